"""Tests of `tandem run --explain`: tables of what happened and of what a change would gain."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.cli.explain import layer_table, what_if
from tandem.cli.main import main
from tandem.experts.tracing.cache_statistics import CacheStatistics, LayerCounts
from tandem.hardware.profiles import save_profile
from tandem.policy.eviction.next_use import NextUse
from tandem.policy.plan import Geometry
from tandem.trace import RoutingTrace, read_trace
from tests.experts.machines import make_executor, make_machine, make_store
from tests.hf.tiny import save_half_checkpoint, save_tiny_checkpoint
from tests.programs import ENVIRONMENT, tandem

TRACE = Path(__file__).parents[2] / "data" / "traces" / "gpt-oss-20b.npz"


def test_a_run_is_explained(tmp_path: Path) -> None:
    model = save_tiny_checkpoint(tmp_path / "tiny")
    save_profile(make_machine().profile, tmp_path / "machine.json")
    words = ["run", str(model), "--explain", "-p", "hello", "--max-new-tokens", "6"]
    words += ["--device", "emulated", "--gpu-memory", "300kB", "--json"]
    words += ["--profile", str(tmp_path / "machine.json")]
    done = tandem(*words, env={**ENVIRONMENT, "TANDEM_CACHE": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert re.search(r"not native: \d+ of the \d+ calls of a decode step", done.stderr)
    assert re.search(r"layer +active +hits", done.stderr)
    assert re.search(r"as it is .* 1\.00 x", done.stderr)
    assert "experts in int4" in done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    # Planned layers are no native call; their times are not part of the run.
    assert "experts" in {entry["operation"] for entry in report["not_native"]}
    assert report["generated_tokens"] == 6
    assert re.search(r"speculation: \d+ tokens drafted, \d+ kept; ", done.stderr)
    assert report["why_nothing_is_drafted"] is None


def test_without_an_expert_cache_the_decode_step_is_explained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = save_tiny_checkpoint(tmp_path / "tiny")
    words = ["run", str(model), "--explain", "-p", "x", "--max-new-tokens", "6", "--json"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert re.search(
        r"not native: \d+ of the \d+ calls of a decode step, [.\d]+ of [.\d]+ ms: ", err
    )
    assert re.search(r"not native of a prompt: \d+ calls of torch for 128 tokens, ", err)
    assert "layer" not in err
    report = json.loads(out.splitlines()[-1])
    assert {entry["operation"] for entry in report["prompt_not_native"]} >= {"index"}
    assert report["why_slower"] is None
    assert re.search(r"speculation: 0 tokens drafted, 0 kept; \d steps had none: ", err)
    assert sum(report["steps_by_drafted_tokens"].values()) == 5
    assert report["why_nothing_is_drafted"] is None
    assert report["speculation"] == {
        "drafted": 0, "accepted": 0, "tokens_per_step": 1.0, "saved_expert_bytes": 0
    }  # fmt: skip
    calls = {entry["operation"]: entry["calls"] for entry in report["not_native"]}
    assert all(count > 0 for count in calls.values())
    assert calls
    assert all(entry["milliseconds"] > 0 for entry in report["not_native"])


@pytest.mark.parametrize(
    ("save", "more", "why"),
    [
        (save_tiny_checkpoint, ["--max-new-tokens", "1"], "no decode step was replayed"),
        (save_tiny_checkpoint, ["--no-compile"], "no decode step was replayed"),
        (save_half_checkpoint, [], "steps run padded, on Transformers' own caches"),
    ],
)
def test_steps_that_are_not_replayed_are_not_counted(
    save: Callable[[Path], Path],
    more: list[str],
    why: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    model = save(tmp_path / "tiny")
    words = ["run", str(model), "--explain", "-p", "x", "--json", "--max-new-tokens", "6", *more]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert f"not native: not counted, as {why}" in err
    report = json.loads(out.splitlines()[-1])
    assert report["not_native"] is None
    assert (report["why_slower"] is None) == (save is save_tiny_checkpoint)


def test_the_table_sums_over_layers() -> None:
    statistics = CacheStatistics()
    statistics.layers = {0: LayerCounts(active=4, hits=1), 1: LayerCounts(active=6, hits=5)}
    eviction = NextUse(Geometry(num_layers=2, num_experts=8, top_k=2))
    head, first, _, last = layer_table(statistics, eviction).splitlines()
    assert last.split()[:4] == ["all", "10", "6", "60%"]
    assert head.endswith("evicts by")
    assert first.endswith("next-use")


@pytest.fixture(scope="module")
def trace() -> RoutingTrace:
    trace = read_trace(TRACE).sequences(0, 1)
    trace.meta.more["prompt_tokens"] = [16]
    return trace


@pytest.mark.slow
def test_every_change_is_an_improvement_where_it_must_be(trace: RoutingTrace) -> None:
    store, geometry = make_store(trace.meta.geometry), trace.meta.geometry
    machine = make_machine(geometry, dense=0.0)
    every = geometry.num_layers * geometry.num_experts
    cache = make_executor(store, every // 4, machine=machine, geometry=geometry).cache
    as_it_is, *changes = what_if(trace, cache)
    assert as_it_is.what == "as it is"
    assert len(changes) == 4
    assert all(change.seconds < as_it_is.seconds for change in changes)
    assert changes == sorted(changes, key=lambda change: change.seconds)
    in_graph = what_if(trace, cache, in_graph=True)[0]
    assert in_graph.seconds > as_it_is.seconds  # nothing is fetched for the layer that runs
