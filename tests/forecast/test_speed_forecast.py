"""Tests of the speed forecast: a prefix of a model's layers is timed and extrapolated."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tandem.bench.generation import dense_bytes
from tandem.forecast import speed_forecast
from tandem.forecast.gpu_forecast import shape_sizes
from tandem.forecast.report import speed_stages
from tandem.forecast.report.speed_stages import on_cpu
from tandem.forecast.speed_forecast import Times, extrapolate, forecast_speed, prefixes_to_time
from tandem.foreign_types import PreTrainedModel
from tandem.hf.config import OffloadConfig
from tests.forecast.test_report import SMALL, comes_true


def as_kinds(pattern: str) -> list[tuple[bool, str]]:
    """Return a letter for each layer, in upper case if it has experts."""
    return [(letter.isupper(), letter) for letter in pattern]


@pytest.mark.parametrize(
    ("pattern", "prefixes"),
    [
        ("A" * 48, [2, 12]),
        ("a" + "B" * 26, [2, 12]),
        ("aaa" + "B" * 58, [4, 14]),
        ("LLLF" * 10, [4, 12]),
        ("mEmEm*EmEmEm*EmEmEm*EmEmEm*EmEmEm*EmEmEmEm*EmEmEmEmE", [6, 15]),
        ("A" * 5, [2, 5]),
        ("AB", [1, 2]),
        ("A" * 20 + "B", [2, 12]),  # no other layer is like the last one
    ],
)
def test_the_shortest_prefix_with_each_kind_is_timed(pattern: str, prefixes: list[int]) -> None:
    assert prefixes_to_time(as_kinds(pattern), 1000) == prefixes


@pytest.mark.parametrize("room", range(3, 30))
@pytest.mark.parametrize("pattern", ["A" * 48, "aaa" + "B" * 40, "LLLF" * 10])
def test_prefixes_fit_into_the_room(pattern: str, room: int) -> None:
    kinds = as_kinds(pattern)
    few, more = prefixes_to_time(kinds, room)
    assert 0 < few < more <= len(kinds)
    assert sum(has for n in (few, more) for has, _ in kinds[:n]) <= room


def test_layers_are_extrapolated_in_a_straight_line() -> None:
    assert extrapolate((2, 1.0), (6, 2.0), 48) == pytest.approx(2.0 + 42 * 0.25)
    assert extrapolate((4, 1.0), (4, 1.0), 4) == 1.0
    assert extrapolate((2, 1.0), (6, 0.9), 48) == 0.9  # noise must not reduce the time


def keep_bytes(kept: list[int], model: PreTrainedModel) -> Times:
    """Replaces a timing; records what each step reads beside the experts."""
    kept.append(dense_bytes(model))
    return Times(1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("expert_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("dense_dtype", ["none", "auto", "int4"])
def test_what_is_timed_reads_the_bytes_that_the_plan_says(
    expert_dtype: str, dense_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    monkeypatch.setattr(speed_forecast, "time_model", partial(keep_bytes, kept))
    offload = OffloadConfig(expert_dtype=expert_dtype, dense_dtype=dense_dtype)
    sizes = shape_sizes(SMALL, offload)
    forecast_speed(sizes, offload, cache_dir=tmp_path, rounds=1)
    embeddings = 2 * sizes.config.vocab_size * sizes.config.hidden_size
    assert kept == [pytest.approx(sizes.total_dense_bytes - embeddings, rel=0.01)]


def test_a_datapoint_measures_the_model_that_it_forecasts(monkeypatch: pytest.MonkeyPatch) -> None:
    forecast: list[int] = []
    measured: list[int] = []
    monkeypatch.setattr(speed_forecast, "time_model", partial(keep_bytes, forecast))
    measure = speed_stages._measured

    def keep_and_measure(model: PreTrainedModel) -> speed_stages.Speeds:
        measured.append(dense_bytes(model))
        return measure(model)

    monkeypatch.setattr(speed_stages, "_measured", keep_and_measure)
    on_cpu(SMALL, "int4", rounds=1)
    assert forecast == measured


def test_other_programs_are_told_from_this_one() -> None:
    others = speed_stages.OtherPrograms()
    assert 0 <= others.cores <= 2 * (os.cpu_count() or 1)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        assert comes_true(lambda: others.cores > 0.05)
        other.kill()
