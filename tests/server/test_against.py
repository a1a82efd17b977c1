"""Tests of the benchmark of two servers: its requests, and parsing the load report."""

import argparse
import itertools
from pathlib import Path
from typing import Any

import pytest
from benchmarks.server.against import Cell, command_of, figures, main, prompts, summary


def cell(kind: str, **values: int) -> Cell:
    return Cell(
        **{"at_once": 2, "prompt_tokens": 64, "output_tokens": 8, "requests": 4, "kind": kind}  # type: ignore[arg-type]
        | values
    )


def report(seconds: float) -> dict[str, Any]:
    times = {"mean": 20.0, "percentiles": {"p50": 10.0, "p95": 30.0, "p99": 40.0}}
    return {
        "scheduler_metrics": {"measure_start_time": 5.0, "measure_end_time": 5.0 + seconds},
        "metrics": {
            "request_totals": {"successful": 4, "errored": 0},
            "prompt_token_count": {"successful": {"total_sum": 256.0}},
            "output_token_count": {"successful": {"total_sum": 32.0}},
            "time_to_first_token_ms": {"successful": times},
            "inter_token_latency_ms": {"successful": times},
        },
    }


@pytest.mark.parametrize("kind", ["plain", "shared", "agent"])
def test_no_prompt_is_sent_twice(kind: str) -> None:
    first, second = (prompts(cell(kind), seed) for seed in (1, 2))
    assert len({*first, *second}) == 8
    if kind == "agent":
        assert [len(text) for text in first] == [16, 32, 48, 64]
        assert all(b.startswith(a) for a, b in itertools.pairwise(first))
        return
    assert {len(text) for text in first} == {64}
    assert (first[0][:32] == first[1][:32]) is (kind == "shared")
    assert first[0][:32] != second[0][:32]


def test_figures_are_a_reports() -> None:
    kept = figures(report(2.0), cell("plain"))
    assert kept["output_tokens_per_second"] == 16
    assert kept["prompt_tokens_per_second"] == 128
    assert kept["decode_tokens_per_second"] == 100
    assert kept["first_token_seconds"] == {"p50": 0.01, "p95": 0.03, "p99": 0.04}
    with pytest.raises(SystemExit, match="of 5 requests 4 were answered"):
        figures(report(2.0), cell("plain", requests=5))


def test_a_ratio_is_the_median_over_rounds() -> None:
    options = argparse.Namespace(
        kind="plain", at_once=[2], prompt_tokens=[64], output_tokens=8, requests=4
    )
    rounds = [
        {
            "tandem": [figures(report(ours), cell("plain"))],
            "other": [figures(report(4.0), cell("plain"))],
        }
        for ours in (1.0, 2.0, 3.0)
    ]
    (found,) = summary(rounds, options)
    assert found["tandem_over"]["other"]["output"] == 2
    assert found["at_once"] == 2


def test_each_server_has_room_for_all_requests() -> None:
    options = argparse.Namespace(
        kind="plain", at_once=[1, 8], prompt_tokens=[64, 128], output_tokens=8, requests=None,
        file=Path("m.gguf"), threads=2, tandem_flags=["--strict"],
    )  # fmt: skip
    ours = command_of("tandem", [], options, 7)
    assert ours[ours.index("--max-running") + 1] == "8"
    assert ours[-1] == "--strict"
    theirs = command_of("llama-server", ["srv", "--x"], options, 7)
    assert theirs[:2] == ["srv", "--x"]
    assert theirs[theirs.index("-c") + 1] == str(8 * (128 + 8 + 64))
    assert command_of("o", ["o", "{file}", "{port}"], options, 7) == ["o", "m.gguf", "7"]


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--guidellm", "no-such-program"])
    assert "no-such-program is not here" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="llama-server: no program 'no-such-server'"):
        main(["--guidellm", "true", "--file", "m.gguf", "--llama-server", "no-such-server"])
