"""Prints a table of the resources that the Triton kernels need on the supported GPUs.

    python -m tests.kernels.compiled_sizes

It takes minutes: it compiles all cases for all GPUs; the tests compile each case for one GPU.
"""

import json
import subprocess
import sys
from typing import Any

from tests.kernels.compile_triton import CASES
from tests.kernels.test_triton import SHARED_KIB

GPUS = (75, 80, 86, 89, 90, 120)


def compiled(*arguments: object) -> list[dict[str, Any]]:
    """Return the compiler's results from a separate process."""
    command = [sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return [result for result in found if "kernel" in result]


def main() -> None:
    """Compile the kernels and print the table."""
    print("| compute capability | kernels | shared memory, most | of a card's | with spills |")
    print("|---|---|---|---|---|")
    for gpu in GPUS:
        found = compiled("tests.kernels.compile_triton", gpu, len(CASES))
        steps = compiled("tests.kernels.compile_triton_steps", gpu)
        found += steps
        most = max(result["shared_bytes"] for result in found) / 1024
        spilled = sum(result["spilled_bytes"] > 0 for result in found)
        limit = SHARED_KIB[gpu]
        print(
            f"| {gpu / 10} | {len(found)} | {most:.0f} KiB | {limit} KiB | {spilled} |", flush=True
        )


if __name__ == "__main__":
    main()
