"""Tests of Ctrl-C in `tandem run` on a device with threads: the program ends and leaves nothing."""

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from tests.programs import ENVIRONMENT, IMPORTS, Program

PROGRAM = """
import atexit, sys, threading
import tandem.hf.machine.profile as machine
measure = machine.measure_profile
def measuring(*args, **options):
    print("measuring", file=sys.stderr, flush=True)
    return measure(*args, **options)
machine.measure_profile = measuring
from tandem.cli.main import main
exit_code = main(sys.argv[1:])
atexit._run_exitfuncs()  # as Python does at the end; what lives then has been left behind
names = [t.name for t in threading.enumerate() if t.name.startswith("tandem")]
print(f"threads left: {names}", file=sys.stderr)
sys.exit(exit_code)
"""
FLAGS = (
    *("--device", "threaded", "--gpu-memory", "500KB"),
    *("--link-bandwidth", "20MB/s", "-p", "hello", "--max-new-tokens", "100000"),
)


@contextlib.contextmanager
def started(model: str, cache: Path, *flags: str) -> Iterator[tuple[Program, IO[str], IO[str]]]:
    """Start the program; return it with its output and error streams."""
    words = ["run", model, *FLAGS, *flags]
    environment = {**ENVIRONMENT, "TANDEM_CACHE": str(cache)}
    out, errors = os.pipe(), os.pipe()
    with open(os.devnull) as nothing, open(out[0]) as answers, open(errors[0]) as complaints:
        files = (nothing.fileno(), out[1], errors[1])
        imports = f"import tests.threaded\n{IMPORTS}"
        with Program(words, files, code=PROGRAM, env=environment, imports=imports) as program:
            os.close(out[1])
            os.close(errors[1])
            yield program, answers, complaints


def files_of(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def test_an_answer_that_is_stopped_is_printed_and_leaves_no_thread_and_whole_files(
    model: str, tmp_path: Path
) -> None:
    flags = ("--profile", "laptop-8gb", "--json")
    with started(model, tmp_path, *flags) as (program, out, complaints):
        text = out.read(1)
        assert text, complaints.read()  # decode steps are under way
        program.send_signal(signal.SIGINT)
        errors = complaints.read()
        exit_code = program.wait(60)
        *answer, last = (text + out.read()).splitlines()
    assert exit_code == 130, errors
    assert json.loads(last)["text"] == "\n".join(answer) != ""
    assert json.loads(last)["finish_reason"] == "interrupted"
    assert "Traceback" not in errors
    assert "threads left: []" in errors
    decoded = re.search(r"decode .*\((\d+) tokens\)", errors)
    assert decoded, errors
    assert int(decoded[1]) < 200  # of the 234 that fit
    kept = {path.parent.name: path for path in files_of(tmp_path)}
    assert set(kept) == {"heat"}
    assert np.load(kept["heat"]).sum() > 0


def test_a_measurement_that_is_stopped_leaves_no_profile(model: str, tmp_path: Path) -> None:
    with started(model, tmp_path) as (program, _, complaints):
        seen = ""
        while "measuring" not in seen:
            line = complaints.readline()
            assert line, seen
            seen += line
        program.send_signal(signal.SIGINT)
        errors = complaints.read()
        exit_code = program.wait(60)
    assert exit_code == 130, errors
    assert "Traceback" not in errors
    assert "threads left: []" in errors
    assert files_of(tmp_path) == []
