"""Tests of `tandem bench kernels` as a user starts it; speed is not checked."""

import json

import pytest

from tests.programs import tandem


def test_measures_kernels_and_ends_with_json() -> None:
    words = ["bench", "kernels", "--shape", "olmoe", "--format", "int4,fp8", "--threads", "1"]
    done = tandem(*words, "--tokens", "1", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report["machine"]) == {
        *("read_gigabytes_per_second", "int4_gops", "int8_gops", "bf16_gflops", "threads", "isa")
    }
    found = [(case["format"], case["tokens"]) for case in report["cases"]]
    assert found == [("int4-g32", 1), ("fp8", 1)]
    for case in report["cases"]:
        assert set(case) >= {
            *("shape", "format", "tokens", "microseconds", "gigabytes_per_second", "gops"),
            *("share_of_ceiling", "peer"),
        }
        assert case["microseconds"] > 0
        assert case["peer"] is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--shape", "qwen3-30b"], "unknown shape 'qwen3-30b'; did you mean 'qwen3-30b-a3b'"),
        (["--format", "int9"], "unknown weight format 'int9'; did you mean"),
        (["--tokens", "1,x"], "tokens has 'x'; expected numbers in 1..65536"),
        (["--tokens", "0"], "tokens has '0'; expected numbers in 1..65536"),
        (["--threads", "0"], "threads is 0; expected a number of threads in 1..1024"),
    ],
)
def test_mistakes_get_one_sentence(words: list[str], sentence: str) -> None:
    done = tandem("bench", "kernels", *words)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
