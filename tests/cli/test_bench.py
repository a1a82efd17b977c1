"""`tandem bench kernels` as a user starts it; speeds are not checked here."""

import json

import pytest

from tests.cli.test_run import tandem


def test_measures_kernels_and_ends_with_json() -> None:
    words = ["bench", "kernels", "--shape", "olmoe", "--formats", "int4-g32", "--threads", "1"]
    done = tandem(*words, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report["machine"]) == {
        *("read_gigabytes_per_second", "int8_gops", "bf16_gflops", "threads", "isa")
    }
    assert [case["tokens"] for case in report["cases"]] == [1, 2, 4, 8, 64, 256]
    for case in report["cases"]:
        assert case["format"] == "int4-g32"
        assert case["microseconds"] > 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--shape", "qwen3-30b"], "unknown shape 'qwen3-30b'; did you mean 'qwen3-30b-a3b'"),
        (["--formats", "int5"], "unknown weight format 'int5'; did you mean"),
        (["--formats", "fp8"], "no native kernels for 'fp8'"),
        (["--threads", "0"], "threads is 0; expected a number of threads in 1..1024"),
    ],
)
def test_mistakes_get_one_sentence(words: list[str], sentence: str) -> None:
    done = tandem("bench", "kernels", *words)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
