"""Tests of the comparison with peers: the commands of rivals, and ratios."""

import stat
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
from benchmarks.generation.against_peers import rival

from tandem.bench.peers.llama_bench import LlamaBench
from tandem.bench.peers.llama_cpp import widest_isa
from tandem.bench.peers.setting import Setting, Speeds
from tandem.bench.peers.turns import ratios, table

SETTING = Setting(
    gguf=Path("model.gguf"), threads=2, prompt=512, steps=32
)  # fmt: skip


def program(folder: Path, script: str) -> Path:
    path = folder / "llama-bench"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_rival_runs_with_the_arguments_of_llama_bench(tmp_path: Path) -> None:
    # Prints its arguments like a prompt's speed, and no depth if none is requested.
    rows = (
        '[{"n_prompt": 512, "n_gen": 0, "avg_ts": 100.5}, '
        '{"n_prompt": 0, "n_gen": 32, "avg_ts": 10.25}]'
    )
    script = f"echo \"$@\" > {tmp_path}/arguments; echo '{rows}'"
    name, make = rival(f"fork={program(tmp_path, script)} -rtr 1")
    assert name == "fork"
    assert make(SETTING).measure(0) == Speeds(100.5, 10.25, 0.0, 0.0)
    expected = "-rtr 1 -m model.gguf -t 2 -r 1 -p 512 -n 32 -o json"
    assert (tmp_path / "arguments").read_text().strip() == expected
    make(SETTING).measure(4096)
    assert (tmp_path / "arguments").read_text().strip() == f"{expected} -d 4096"


def test_a_rival_that_fails_is_an_error_that_says_why(tmp_path: Path) -> None:
    path = program(tmp_path, "echo no such file >&2; exit 3")
    with pytest.raises(OSError, match="ended with 3: no such file"):
        LlamaBench([str(path)], SETTING).measure(0)
    with pytest.raises(OSError, match="reports no prompt"):
        LlamaBench([str(program(tmp_path, "echo '[]'"))], SETTING).measure(0)
    for rubbish in ("echo '[{}]'", "echo fast", "printf '\\377\\376'"):
        with pytest.raises(OSError, match="expected llama-bench's JSON"):
            LlamaBench([str(program(tmp_path, rubbish))], SETTING).measure(0)
    with pytest.raises(OSError, match="ended with 3: it wrote nothing"):
        LlamaBench([str(program(tmp_path, "exit 3"))], SETTING).measure(0)
    for text in ("fork", "=x", f"fork={tmp_path}/missing"):
        with pytest.raises(ArgumentTypeError, match="write NAME=PATH_TO_LLAMA_BENCH"):
            rival(text)


def test_ratios_are_medians_of_turns_next_to_each_other() -> None:
    ours = [Speeds(100, 10, 0, 0), Speeds(50, 5, 0, 0), Speeds(90, 30, 0, 0)]
    theirs = [Speeds(50, 10, 0, 0), Speeds(25, 5, 0, 0), Speeds(10, 10, 0, 0)]
    assert ratios(ours, theirs) == (2, 1)
    rows = table({"tandem": {0: ours}, "llama.cpp": {0: theirs}}, [0])
    assert rows[-1] == "| llama.cpp | 0 | 25.0, 10.0 | 2.00, 1.00 |  |"


@pytest.mark.parametrize(
    ("system_info", "isa"),
    [
        ("CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 1 | AMX_INT8 = 1 | OPENMP = 1 | ", "AVX512"),
        ("CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | AVX512 = 0 | ", "AVX2"),
        ("CPU : AVX2 = 1 | AVX512 = 1 | ", "AVX512"),
        ("CPU : NEON = 1 | ", "no vectors"),
    ],
)
def test_what_llama_cpp_was_compiled_for_is_named(system_info: str, isa: str) -> None:
    assert widest_isa(system_info) == isa
