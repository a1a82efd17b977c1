"""Tests of the host slot benchmark: gaps, losses against LRU, and regressions."""

import pytest
from benchmarks.policy.host_slots import Cell, Point, all_traces, points_of, slower_with_more

from tandem.hardware.profiles import load_profile


def point(gigabytes: float, speed: float) -> Point:
    return Point("t", gigabytes, 0.5, 0.9, 0.9, speed, speed)


def test_a_step_back_is_found() -> None:
    points = [point(9, 2.0), point(8, 1.0), point(10, 1.9), point(11, 1.9)]
    assert slower_with_more(points) == [points[2]]


def test_a_gap_that_is_none_is_closed() -> None:
    assert Cell("t", 0.5, 0.7, 0.6, 0.8).gap_closed == pytest.approx(0.5)
    assert Cell("t", 0.5, 0.6, 0.6, 0.6).gap_closed == 1.0


def test_traces_have_the_shape_whose_memory_is_shared_out() -> None:
    named = dict(all_traces())
    assert set(named) == {
        "deepseek-v2-lite", "deepseek-v2-lite, 128 experts", "gpt-oss-20b",
        "gpt-oss-20b, 128 experts", "typical",
    }  # fmt: skip
    costs = load_profile("desktop-12gb").shape("qwen3-30b-a3b")
    for name, trace in named.items():
        if "128" in name or name == "typical":
            assert (trace.meta.n_experts, trace.meta.top_k) == (costs.num_experts, costs.top_k)
    (all_fit,) = points_of(("few", named["typical"].sequences(0, 1)), costs, 2e9, [20.0], 40)
    assert all_fit.share == 1.0
