"""Ctrl-C in a real `tandem run` on the emulated device: the program ends, and leaves nothing."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.hf.tiny import save_tiny_checkpoint

# Registered before all others, so it runs after them: what lives then has been left behind.
PROGRAM = """
import atexit, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's shell ignores it
def tell():
    names = [t.name for t in threading.enumerate() if t.name.startswith("tandem")]
    print(f"threads left: {names}", file=sys.stderr)
atexit.register(tell)
import tandem.hf.machine as machine
measure = machine.measure_profile
def measuring(*args, **options):
    print("measuring", file=sys.stderr, flush=True)
    return measure(*args, **options)
machine.measure_profile = measuring
from tandem.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
FLAGS = (
    *("--device", "emulated", "--clock", "real", "--gpu-memory", "500KB"),
    *("--link-bandwidth", "20MB/s", "-p", "hello", "--max-new-tokens", "100000"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


def started(model: str, cache: Path, *flags: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TANDEM_CACHE": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "run", model, *FLAGS, *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def files_of(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def test_an_answer_that_is_stopped_leaves_no_thread_and_whole_files(
    model: str, tmp_path: Path
) -> None:
    program = started(model, tmp_path, "--profile", "laptop-8gb")
    assert program.stdout is not None
    assert program.stdout.read(1), program.communicate()  # decode steps are under way
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    assert program.returncode in (0, 130), errors
    assert "Traceback" not in errors
    assert "threads left: []" in errors
    decoded = re.search(r"decode .*\((\d+) tokens\)", errors)
    assert decoded, errors
    assert int(decoded[1]) < 200  # of the 234 that fit
    kept = {path.parent.name: path for path in files_of(tmp_path)}
    assert set(kept) == {"heat"}
    assert np.load(kept["heat"]).sum() > 0


def test_a_measurement_that_is_stopped_leaves_no_profile(model: str, tmp_path: Path) -> None:
    program = started(model, tmp_path)
    assert program.stderr is not None
    seen = ""
    while "measuring" not in seen:
        line = program.stderr.readline()
        assert line, seen
        seen += line
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 130, errors
    assert "Traceback" not in errors
    assert "threads left: []" in errors
    assert files_of(tmp_path) == []
