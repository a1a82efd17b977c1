"""Plan replay of captured steps: native decisions equal the planner's on recorded runs.

`tandem simulate` and `tandem plan` use this planner for steps in one graph.
"""

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem.experts.cache.native_predictor import NativePredictor
from tandem.experts.cache.policy_tables import NATIVE_TABLES, native_step_policy, resident_lists
from tandem.hardware.profiles import load_profile, profile_names, shape_for
from tandem.kernels import _native
from tandem.policy.assignment import IN_GRAPH
from tandem.policy.cost import GRAPH, DiskCosts, HardwareProfile, ShapeCosts
from tandem.policy.eviction.next_use import NextUse
from tandem.policy.plan import Copy, Geometry, Hint, LayerLoad, LayerPlan
from tandem.policy.planner import Planner
from tandem.policy.prediction.regression_predictor import RegressionPredictor
from tandem.policy.residency import READY
from tandem.policy.settings import PlannerSettings, make_planner_on
from tandem.policy.step_path import CAPTURE_SIZES
from tandem.sim.steps import LoadReader, replay_steps
from tandem.sim.systems import TANDEM
from tandem.sim.timeline import Timeline
from tandem.sim.typical_routing import with_guesses
from tandem.trace import RoutingTrace, read_trace
from tests.experts.captured import sure_of_predictions
from tests.policy.integrity import check_integrity

TRACES = Path(__file__).parents[2] / "data" / "traces"
STEPS = 60
# Of machines that differ only in sizes one is enough; both a fast and a slow link are tested.
MACHINES = [
    pytest.param(name, marks=() if name in ("desktop-16gb", "laptop-8gb") else pytest.mark.slow)
    for name in profile_names()
    if name not in ("desktop-24gb", "ddr4-12gb")
]


@pytest.fixture(
    scope="module", params=["deepseek-v2-lite", pytest.param("gpt-oss-20b", marks=pytest.mark.slow)]
)
def trace(request: pytest.FixtureRequest) -> RoutingTrace:
    """Return a trace with predictions of each next layer's experts."""
    return with_guesses(read_trace(TRACES / f"{request.param}.npz"))


@pytest.mark.parametrize("hardware", MACHINES)
@pytest.mark.parametrize(
    ("rule", "batch", "share"),
    [(None, 4, 0.6)] + [(name, *cell) for name in IN_GRAPH[1:] for cell in ((1, 0.25), (8, 0.6))],
)
@pytest.mark.parametrize(
    ("predicts", "asks"),
    [(False, False), (True, False), (True, True)],
    ids=["", "predicts", "asks"],
)
def test_the_same_experts_are_fetched_copied_ahead_enter_and_leave(
    trace: RoutingTrace,
    hardware: str,
    rule: str | None,
    batch: int,
    share: float,
    *,
    predicts: bool,
    asks: bool,
) -> None:
    """Slots, victims and the link's estimate equal the planner's, whenever copies end."""
    counts = replay(trace, hardware, rule, batch, share, predicts=predicts, asks=asks)
    assert counts["inserted"] > 20
    assert predicts or counts["ahead"] == 0
    if rule is None:
        assert counts["fetched"] == 0
    else:  # with one sequence no copy pays on a slow link
        assert counts["fetched"] > 20 or batch == 1 or hardware == "laptop-8gb"


@pytest.mark.parametrize("predicts", [False, True])
@pytest.mark.parametrize("rule", IN_GRAPH[:2])
def test_what_tokens_alone_decide_is_copied_ahead_alike(
    trace: RoutingTrace, rule: str, *, predicts: bool
) -> None:
    """Copy before the first layer, and at each layer for all known layers after it."""
    counts = replay(
        trace, "laptop-8gb", rule, 4, 0.25, predicts=predicts, asks=False, num_known=3, speed=8
    )
    assert counts["before"] > 20
    assert counts["ahead"] > 20


@pytest.mark.parametrize("rule", IN_GRAPH)
def test_what_a_disk_has_is_priced_and_left_to_the_cpu_alike(
    trace: RoutingTrace, rule: str
) -> None:
    """Two of three misses are in no host slot; a read takes as long as five copies."""
    num_fetched = [
        replay(trace, "desktop-16gb", rule, 4, 0.25, predicts=False, asks=False, on_disk=on_disk)[
            "fetched"
        ]
        for on_disk in (False, True)
    ]
    assert num_fetched[0] > num_fetched[1] > 0 or rule == IN_GRAPH[0]


def random_places(planner: Planner, load: LayerLoad, seed: int) -> bytes:
    """Return random places of a layer's misses in memory over a disk."""
    draw, first = random.Random(seed), planner.geometry.key(load.layer, 0)
    states = [planner.residency.state[first + expert] for expert in load.experts]
    return bytes(0 if state == READY else draw.randrange(3) for state in states)


def check_layer(
    planner: Planner,
    policy: _native.StepPolicy,
    load: LayerLoad,
    now: float,
    known: Sequence[Hint],
    places: bytes,
) -> LayerPlan:
    """Let both decide one layer and learn from it; return the plan."""
    plan = planner.plan(load, now, known, places)
    where = dict(zip(load.experts, places, strict=False))
    assert not any(where.get(copy.expert) for copy in plan.fetch)
    assert not plan.arriving
    guess = known[0].load[1:3] if known else ((), ())
    native = policy.decide(load.layer, load.experts, load.tokens, now, *guess, places)
    copies = plan.fetch, plan.prefetch, plan.insert
    assert native == tuple(as_tuples(some) for some in copies)
    assert policy.link_free_at() == planner.link.free_at
    planner.learn()
    policy.learn(load.layer)
    policy.warm_up(load.layer + 1)  # which changes nothing
    return plan


def replay(
    trace: RoutingTrace,
    hardware: str,
    rule: str | None,
    batch: int,
    share: float,
    *,
    predicts: bool,
    asks: bool,
    num_known: int = 0,
    speed: float = 1.0,
    on_disk: bool = False,
) -> Counter[str]:
    """Drive both through a trace and compare them; return the copies.

    The first `num_known` layers are routed by token. `speed` multiplies the link's bandwidth.
    """
    geometry, profile = trace.meta.geometry, load_profile(hardware)
    shape = shape_for(profile, trace.meta.model, geometry)
    if any(host.path == GRAPH for host in profile.host):
        shape = profile.charged(shape, GRAPH)
    link = shape.link_seconds_per_expert / speed
    shape = dataclasses.replace(shape, link_seconds_per_expert=link)
    rate = shape.expert_bytes / (5 * link)
    disk = DiskCosts(reads="direct", piece_bytes=1, depths=(1,), bytes_per_second=(rate,))
    profile = dataclasses.replace(profile, disk=disk)
    settings = dataclasses.replace(
        TANDEM, assignment=rule, predicting_sizes=CAPTURE_SIZES if predicts else (),
        asking_sizes=CAPTURE_SIZES if asks else (), copies_prompts=num_known > 0,
    )  # fmt: skip
    planner, template = planners(profile, shape, settings, geometry, share)
    policy = native_step_policy(template)
    assert policy is not None
    timeline, reader, counts = Timeline(profile, shape), LoadReader(trace), Counter[str]()
    steps = itertools.islice(replay_steps(trace, batch, prompt=1), STEPS // batch + 8)
    for number, step in enumerate(steps):
        # Some steps do not prefetch, like other sizes, and find late copies.
        planner.predicting_sizes = settings.predicting_sizes[: 4 * (number % 4)]
        planner.asking_sizes = settings.asking_sizes[: 4 * (number % 5)]
        loads = [*reader.loads(step)]
        ahead = begin_step(
            planner, policy, settings, len(step.tokens), timeline.now, loads[:num_known]
        )
        timeline.issue(ahead)
        counts["before"] += len(ahead)
        hints = [*reader.hints(step)[1:], []]
        for load, known in zip(loads, hints, strict=True):
            timeline.run_dense(len(step.tokens))
            for arrival in timeline.arrivals():
                planner.copy_finished(*arrival)
                policy.copy_finished(*arrival)
            places = random_places(planner, load, number) if on_disk else b""
            plan = check_layer(planner, policy, load, timeline.now, known, places)
            timeline.run(load, plan)
            copies = plan.fetch, plan.prefetch, plan.insert
            for name, some in zip(("fetched", "ahead", "inserted"), copies, strict=True):
                counts[name] += len(some)
    check_same_residency(planner, policy.resident())
    check_same_predictions(planner, template)
    return counts


def planners(
    profile: HardwareProfile,
    shape: ShapeCosts,
    settings: PlannerSettings,
    geometry: Geometry,
    share: float,
) -> list[Planner]:
    """Return two equal planners, with Python and native tables; a `share` of experts has slots."""
    num_slots = int(share * geometry.num_layers * geometry.num_experts)
    resident = range(0, geometry.num_layers * geometry.num_experts, 7)
    sizes = settings.set_sizes(geometry, num_slots)
    chosen = [k for k in resident if k % geometry.num_experts < 7 * min(sizes)]
    found = [
        make_planner_on(profile, shape, settings, geometry, num_slots, resident=chosen, tables=t)
        for t in (None, NATIVE_TABLES)
    ]
    if settings.predicting_sizes:
        for each in found:
            sure_of_predictions(each)
    return found


def begin_step(
    planner: Planner,
    policy: _native.StepPolicy,
    settings: PlannerSettings,
    num_tokens: int,
    now: float,
    known: Sequence[LayerLoad],
) -> tuple[Copy, ...]:
    """Begin a step in one graph on both sides; return the copies before its first layer."""
    policy.end_step()
    rule_idx = IN_GRAPH.index(settings.rule(graph_tokens=num_tokens))
    if rule_idx:  # staging slots may have changed
        planner.ring.begin_step(in_graph=True)
        policy.load(*resident_lists(planner), planner.link.free_at, [*planner.link.pending])
    ahead = planner.begin_step(num_tokens, now, in_graph=True, known=known)
    asks = planner.asks_in_graph(num_tokens)
    policy.set_rule(rule_idx, planner.predicts_in_graph(num_tokens), asks)
    dense = planner.graph_rule(num_tokens).dense_seconds(planner.costs, num_tokens, asks=asks)
    loads = [(load.layer, load.experts, load.tokens) for load in known]
    assert policy.begin_step(dense, loads, now) == as_tuples(ahead)
    return ahead


def check_same_predictions(planner: Planner, template: Planner) -> None:
    assert isinstance(planner.prediction, RegressionPredictor)
    assert isinstance(template.prediction, NativePredictor)
    assert template.prediction.state() == planner.prediction.state()


def as_tuples(copies: Sequence[Copy]) -> list[tuple[int, int, int, int]]:
    return [
        (c.layer, c.expert, c.slot, -1 if c.evicts is None else c.evicts.expert) for c in copies
    ]


def check_same_residency(
    planner: Planner,
    native: tuple[bytes, list[int], list[list[int]], list[list[int]], list[int], list[int]],
) -> None:
    residency, experts = planner.residency, planner.geometry.num_experts
    state, slot_of, members, free, ahead, free_ahead = native
    check_integrity(residency)
    assert state == residency.state
    assert slot_of == residency.slot_of
    layers = range(planner.geometry.num_layers)
    assert [[layer * experts + e for e in members[layer]] for layer in layers] == (
        residency.members[: len(layers)]
    )
    assert [*free, free_ahead] == residency.free
    assert ahead == residency.members[residency.staging]


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        ([(1, [0], [1]), (0, [0], [1])], "layers in their order"),
        ([(0, [64], [1])], "experts of the layer"),
        ([(0, [3, 4], [1])], "a token count for each known expert"),
        ([(0, [3], [0])], "at least one token"),
    ],
)
def test_what_cannot_be_known_is_refused(
    trace: RoutingTrace, known: list[tuple[int, list[int], list[int]]], reason: str
) -> None:
    geometry, profile = trace.meta.geometry, load_profile("laptop-8gb")
    shape = shape_for(profile, trace.meta.model, geometry)
    planner = make_planner_on(profile, shape, TANDEM, geometry, 64, tables=NATIVE_TABLES)
    policy = native_step_policy(planner)
    assert policy is not None
    with pytest.raises(ValueError, match=reason):
        policy.begin_step(0.0, known)


def test_other_policies_have_no_native_form(trace: RoutingTrace) -> None:
    geometry, profile = trace.meta.geometry, load_profile("laptop-8gb")
    shape = shape_for(profile, trace.meta.model, geometry)
    for settings in (
        dataclasses.replace(TANDEM, eviction="lru"),
        dataclasses.replace(TANDEM, pool="shared"),
    ):
        planner = make_planner_on(profile, shape, settings, geometry, 64, tables=NATIVE_TABLES)
        assert native_step_policy(planner) is None
    plain = make_planner_on(profile, shape, TANDEM, geometry, 64)
    assert isinstance(plain.eviction, NextUse)
    assert native_step_policy(plain) is None
