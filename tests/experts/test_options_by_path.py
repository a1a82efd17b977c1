"""Tests of each option on each path: it is followed, or steps are planned, or it is refused.

The paths: the CPU alone, planned steps on a GPU or on the emulated device, steps in one graph.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.main import main
from tandem.core.config import add_flags
from tandem.core.errors import ConfigError
from tandem.devices.options import OffloadOptions, offload_options
from tandem.hardware.profiles import load_profile
from tandem.policy.assignment import ASSIGNMENTS, IN_GRAPH
from tandem.policy.cost import CostTable
from tandem.policy.eviction import EVICTIONS, IN_HOST_SLOTS
from tandem.policy.plan import LayerLoad
from tandem.policy.planner import Planner
from tandem.policy.settings import FETCHING_RULE, GRAPH_RULE, PlannerSettings, make_planner
from tandem.policy.step_path import StepPath, run_path
from tandem.sim.systems import SimulatedSettings
from tests.policy.strategies import GEOMETRY, shape_costs

TRACE = str(Path(__file__).parents[2] / "data" / "traces" / "gpt-oss-20b.npz")
DESKTOP = load_profile("desktop-12gb")

# Flags of decisions, and why steps with them are planned; None: one graph follows them.
DECISIONS: list[tuple[list[str], str | None]] = [
    *(
        (["--assignment", name], None if name in IN_GRAPH else f"assignment {name}")
        for name in ASSIGNMENTS
        if not name.startswith("exact")  # the simulator's
    ),
    *(
        (["--eviction", name], None if name == "next-use" else f"eviction {name}")
        for name in EVICTIONS
    ),
    (["--prediction", "none"], None),
    (["--prediction", "regression"], None),
    (["--prefetch-count", "0"], None),
    (["--prefetch-count", "1"], None),
    (["--prediction", "none", "--prefetch-count", "1"], None),  # nothing can be prefetched
    (["--look-ahead"], None),  # of routers that are a product; otherwise steps are planned
    (["--look-ahead", "--residuals", "r.npz"], None),
    (["--pool", "by-layer"], None),
    (["--pool", "shared"], "pool shared"),
    (["--no-decode-graph"], "no-decode-graph"),
]
# Flags of the machine and its memory, which all paths follow.
OF_MACHINE = [
    ["--gpu-memory", "1GiB"],
    ["--link-bandwidth", "4GB/s"],
    ["--profile", "laptop-8gb"],
    ["--start-content", "none"],
]
ALL = [*(words for words, _ in DECISIONS), *OF_MACHINE, ["--emulated-speed", "4"]]


def parsed(device: str, words: Sequence[str]) -> OffloadOptions:
    parser = argparse.ArgumentParser()
    add_flags(parser, OffloadOptions)
    return offload_options(parser.parse_args(["--device", device, *words]))


def test_every_option_of_a_device_is_tried() -> None:
    tried = {word for words in ALL for word in words if word.startswith("--")}
    names = {f"--{name.replace('_', '-')}" for name in ("gpu_memory", *OffloadOptions.rare)}
    assert {word.replace("--no-", "--") for word in tried} == names


def test_every_setting_of_a_planner_is_named_or_cannot_matter() -> None:
    """A new setting needs a decision: can a step in one graph follow it?"""
    changed: dict[str, Any] = {
        "assignment": "balanced",
        "eviction": "lru",
        "pool": "shared",
        "assignment_options": (("pipelined", False),),
        "eviction_options": (("window", 3),),
    }
    # Prefetches, prompts, and limits that a step without fetches never reaches.
    others = {"prefetch", "must_prefetch", "copies_prompts", "max_fetches", "never_worse_than_cpu"}
    of_graphs = {"fetching_sizes", "prediction", "prefetch_count", "predicting_sizes"}
    of_graphs |= {"can_ask", "asking_sizes"}
    known = {*changed, *others, *of_graphs}
    assert {field.name for field in dataclasses.fields(PlannerSettings)} == known
    for name, value in changed.items():
        why = PlannerSettings(**{name: value}).why_planned()
        assert why is not None
        assert str(value[0][1] if isinstance(value, tuple) else value) in why
    assert PlannerSettings(assignment="ready-on-gpu", max_fetches=1).why_planned() is None
    staged = SimulatedSettings(
        prediction="regression", prefetch_count=1, prefetch="top-k", must_prefetch=False
    )
    assert staged.why_planned() == "prefetch top-k"
    requested = SimulatedSettings(prediction="popularity", prefetch_count=1)
    assert requested.why_planned() == "prediction popularity with prefetch_count 1"


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_the_cpu_alone_refuses_it(words: list[str]) -> None:
    flag = words[0].replace("no-", "")
    with pytest.raises(ConfigError, match=rf"^{flag}.*--device cpu.*leave it out"):
        parsed("cpu", words)


@pytest.mark.parametrize("device", ["cpu", "emulated", "cuda"])
@pytest.mark.parametrize("name", EVICTIONS.names())
def test_experts_on_a_disk_are_kept_by_an_eviction_or_it_is_refused(device: str, name: str) -> None:
    words = ["--expert-memory", "1GB", "--eviction", name]
    if name in IN_HOST_SLOTS:
        assert parsed(device, words).eviction == name
    else:
        with pytest.raises(ConfigError, match=rf"^eviction is '{name}'.*one of next-use, lru; ch"):
            parsed(device, words)


def test_what_is_another_devices_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--emulated-speed: not for --device cuda"):
        parsed("cuda", ["--emulated-speed", "4"])


def test_residuals_that_nobody_would_read_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--residuals: no router is run ahead"):
        parsed("cuda", ["--residuals", "r.npz"])


@pytest.mark.parametrize("device", ["cuda", "emulated"])
@pytest.mark.parametrize(("words", "why"), DECISIONS, ids=str)
def test_a_device_follows_it_in_one_graph_or_in_planned_steps(
    device: str, words: list[str], why: str | None
) -> None:
    options = parsed(device, words)
    assert options.why_planned() == why
    path = run_path(DESKTOP, options.why_planned())
    assert path == StepPath("graph" if why is None else "segments", in_graph=why is None)
    settings = options.planner_settings()
    if path.in_graph:
        settings = settings.with_predictions(())
    assert_followed(words, settings, in_graph=path.in_graph)


def assert_followed(words: Sequence[str], settings: PlannerSettings, *, in_graph: bool) -> None:
    """Check the decisions of decode steps against the named policies."""
    flags = dict(pairwise(words))
    name = flags.get("--assignment", "ready-on-gpu" if in_graph else "balanced")
    planner = planner_of(dataclasses.replace(settings, never_worse_than_cpu=False))
    num_ahead = []
    for step in range(40):
        ahead = planner.begin_step(1, float(8 * step), token_ids=(step % 8,), in_graph=in_graph)
        num_ahead.append(len(ahead))
        for layer in range(GEOMETRY.num_layers):
            now = 8.0 * step + 2.0 * layer + 1.0
            for key in [*planner.link.pending]:
                planner.copy_finished(*GEOMETRY.expert_id(key), now)
            load = LayerLoad(layer, tuple(sorted({step % 8, (step + 3) % 8})), (1, 1))
            problem = planner.problem(load, now)
            plan = planner.plan(load, now)
            split = ASSIGNMENTS.factory(name)().assign(problem)
            # By number: among equals the eviction decides what is fetched, and it learns meanwhile.
            num_absent = sum(wait < 0 for wait in problem.wait)
            assert len(plan.fetch) == len(split.fetch)
            assert len(plan.cpu) == num_absent - len(split.fetch) + len(split.spill)
            num_ahead.append(len(plan.prefetch))
    most = int(flags.get("--prefetch-count", "2"))
    is_requested = flags.get("--prediction") == "regression" or "--prefetch-count" in flags
    is_off = (in_graph and not is_requested) or flags.get("--prediction") == "none"
    if is_off or most == 0:
        assert max(num_ahead) == 0
    else:
        assert 1 <= max(num_ahead) <= most
    eviction = EVICTIONS.factory(flags.get("--eviction", "next-use"))(GEOMETRY)
    assert type(planner.eviction) is type(eviction)
    assert planner.residency.num_sets == (1 if flags.get("--pool") == "shared" else 3)


def planner_of(settings: PlannerSettings) -> Planner:
    costs = CostTable(shape_costs(link=0.5))
    planner = make_planner(settings, GEOMETRY, costs, 12, copy_price_seconds=0.01)
    while not planner.ahead.chances.note_chance():
        pass  # as if many prefetches had paid before
    return planner


def graph_of(words: Sequence[str]) -> list[str]:
    return ["simulate", TRACE, "--limit", "20", "--host-path", "graph", *words]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--assignment", "balanced"], "assignment balanced"),
        (["--assignment", "exact"], "assignment exact"),
        (["--eviction", "lru"], "eviction lru"),
        (["--pool", "shared"], "pool shared"),
        (["--prefetch", "1", "--prediction", "popularity"], "prediction popularity with"),
        (["--costs", "equations"], "assignment balanced pipelined False"),
        (["--batch", "9"], "batch 9, as it has at most 8 tokens"),
    ],
)
def test_simulate_refuses_one_graph_with_it(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(graph_of(words)) == 2
    error = capsys.readouterr().err
    assert f"host_path is 'graph', and a decode step in one graph cannot follow {why}" in error
    assert "leave that out, or take host_path 'segments'" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "words", [*(["--assignment", name] for name in IN_GRAPH), ["--batch", "8"], []]
)
def test_simulate_decides_one_graph_as_it_runs(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plans = tmp_path / "plans.jsonl"
    assert main([*graph_of(words), "--prompt", "1", "--dump", str(plans), "--json"]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    rule = result["assignment"]
    if "--assignment" in words:
        assert rule == words[1]
    else:
        assert rule in (GRAPH_RULE, FETCHING_RULE)  # as a trial decides
    assert f"on desktop-12gb, decode steps in one graph by {rule}" in out
    assert result["in_graph"]
    timed = [json.loads(line) for line in plans.read_text().splitlines()]
    timed = [plan for plan in timed if plan.get("run") == "timed" and plan["step"] > 1]
    assert timed
    for plan in timed:
        placed = zip(plan["experts"], plan["wait"], strict=True)
        assert plan["gpu"] == [expert for expert, wait in placed if wait == 0.0]
        assert plan["arriving"] == plan["prefetch"] == []
    assert any(plan["fetch"] for plan in timed) == (rule != "ready-on-gpu")


@pytest.mark.parametrize(
    "words",
    [
        ["--costs", "equations", "--assignment", "dali"],
        ["--prediction", "regression"],
        ["--prefetch-choice", "none"],
    ],
)
def test_simulate_refuses_what_it_would_not_look_at(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", TRACE, "--limit", "20", *words]) == 2
    assert f"{words[0]}" in capsys.readouterr().err


def test_plan_forecasts_the_rule_that_runs_and_refuses_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = ["plan", "--shape", "lfm2-8b-a1b", "--profile", "laptop-8gb", "--json"]
    words = [*plan, "--device", "cuda", "--expert-dtype", "int4", "--host-path"]
    rules = {}
    for path in ("segments", "graph"):
        assert main([*words, path]) == 0
        rules[path] = json.loads(capsys.readouterr().out.splitlines()[-1])["assignment"]
    assert rules == {"segments": "balanced", "graph": "ready-on-gpu"}
    for more, why in (
        (["--assignment", "dali"], "assignment dali"),
        (["--no-decode-graph"], "no-decode-graph"),
    ):
        assert main([*words, "graph", *more]) == 2
        assert f"one graph cannot follow {why}; leave" in capsys.readouterr().err
    # Without a path the run's path is used, on both devices.
    for device in ("cuda", "emulated"):
        assert main([*plan, "--device", device, "--expert-dtype", "int4"]) == 0
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert report["host_path"] == "graph"
