"""Tests of Triton's launch path for a decode step and a prompt, by a driver without a card."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Each takes minutes with all formats, which `make dry-gpu` does.
IS_WHOLE = os.environ.get("TANDEM_DRY_GPU") == "1"


@pytest.mark.timeout(7200 if IS_WHOLE else 600)
@pytest.mark.parametrize("capability", ["75", "89", "90", "120"] if IS_WHOLE else ["89"])
def test_kernels_are_bound_specialised_compiled_and_launched(capability: str) -> None:
    """Run in a process of its own, because the tests' process interprets kernels."""
    options = [capability] if IS_WHOLE else [capability, "--short"]
    command = [sys.executable, "-m", "tests.kernels.launch_triton", *options]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    launched, compiled = (
        {name: int(count) for name, count in (each.split(":") for each in lines[kind].split())}
        for kind in ("launched", "compiled")
    )
    assert {"publish", "combine", "recur_tokens"} <= set(launched)  # and all others: see returncode
    # One that waits and one that does not, for any layer: captures compile nothing.
    assert compiled["combine"] == 2 < launched["combine"]
