"""Tests that randomly drawn configurations take the memory that `tandem plan` forecasts."""

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.plan.draws import Configuration, draw
from benchmarks.plan.found import Found, KeptFinds, figures
from benchmarks.plan.steps import execute, plan, write_model
from benchmarks.plan.verdict import Planned, Taken, differences, memory_ratio

NARROW = draw(2, 12, is_narrow=True)


@pytest.mark.parametrize("configuration", NARROW, ids=lambda one: f"{one.number}-{one.shape}")
def test_a_load_takes_what_the_plan_says(
    configuration: Configuration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "written"
    write_model(configuration, folder)
    planned = plan(replace(configuration, device_share=None), folder)
    experts = planned.experts
    if configuration.device_share or configuration.expert_memory_share:
        planned = plan(configuration, folder, experts)
    assert planned.fits
    taken = execute(configuration, folder, experts)
    assert [one.text for one in differences(planned, taken)] == []


def test_configurations_are_those_of_the_seed() -> None:
    assert draw(3, 40, num_whole=2) == draw(3, 40, num_whole=2)
    assert draw(3, 40) != draw(4, 40)
    *cut, whole = draw(3, 40, num_whole=1)
    assert all(one.num_layers <= 6 for one in cut)
    assert whole.model_shape().values["num_hidden_layers"] == whole.num_layers > 6


def test_what_is_wrong_with_a_plan_is_reported() -> None:
    planned = Planned(
        fits=True, host=100 << 20, program=0, experts=40 << 20, dense=20 << 20, kept=10 << 20,
        draft=0, num_experts=8, device_slots=4, slots_over_disk=None,
    )  # fmt: skip
    taken = Taken(
        peak=125 << 20, experts=40 << 20, dense=20 << 20, kept=16 << 20, draft=0, device_slots=5,
        slots_over_disk=None,
    )  # fmt: skip
    assert [one.part for one in differences(planned, taken)] == ["kept", "slots on the device"]
    assert memory_ratio(planned, taken) == pytest.approx(0.8)
    # If all experts have a slot there is one more, for exchanges.
    whole = replace(planned, device_slots=8, kept=taken.kept)
    assert not list(differences(whole, replace(taken, device_slots=9)))
    found = [Found("a", memory_ratio=1.01), Found("b", ["wrong"], memory_ratio=0.8)]
    assert figures(found)["right"] == figures(found)["memory_within_5_percent"] == 1


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    first, second = draw(0, 2)
    found = Found("a", ["wrong"], memory_ratio=0.8, planned={"fits": True})
    KeptFinds(tmp_path / "kept.jsonl").add(first, found)
    kept = KeptFinds(tmp_path / "kept.jsonl")
    assert kept.of(first) == found
    # Another configuration with the same number is tried again.
    assert kept.of(second) is kept.of(replace(first, context=7)) is None
