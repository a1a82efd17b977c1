"""Tests of reading ahead and lending: host slots decide as the plain reference, in any state."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tandem.experts.cache.host_slots import HostSlots
from tandem.kernels import _native
from tandem.policy import reads
from tandem.policy.plan import Geometry, LayerLoad
from tandem.policy.reads import ComingUse, ReadAhead, SharedSlots
from tandem.policy.residency import READY
from tandem.sim.steps import LoadReader, replay_steps
from tandem.trace import read_trace
from tests.disk.loading import put_on_disk
from tests.experts.machines import make_store

TRACE = Path(__file__).parents[2] / "data" / "traces" / "deepseek-v2-lite.npz"
HELD_SLOTS = 4  # transit slots that copies to a device may borrow


@st.composite
def uses(draw: st.DrawFn) -> list[ComingUse]:
    """Return random loads of some layers of eight experts."""
    layers = sorted(draw(st.sets(st.integers(0, 5), max_size=4)))
    return [
        ComingUse(
            layer,
            draw(st.lists(st.integers(0, 7), unique=True)),
            bytes(draw(st.lists(st.integers(0, 1), min_size=8, max_size=8))),
            draw(st.integers(0, 3)),
        )
        for layer in layers
    ]


@given(coming=uses(), numbers=st.tuples(*[st.integers(0, 9)] * 3))
def test_known_experts_are_read_alike(coming: list[ComingUse], numbers: tuple[int, ...]) -> None:
    shared = SharedSlots(*numbers)
    found = _native.known_reads(coming, *shared)
    expected = reads.known_reads(coming, shared)
    assert [ReadAhead(*each) for each in found] == expected
    for use in coming:
        own = [each for each in expected if each.layer == use.layer and not each.passes]
        assert len(own) <= use.free_slots
    assert sum(each.passes for each in expected) <= shared.free


@given(
    experts=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), min_size=1),
    numbers=st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
def test_prompts_scores_and_loans_are_decided_alike(
    experts: list[tuple[int, int]], numbers: tuple[int, int]
) -> None:
    on_device, scores = bytes(state for state, _ in experts), [score for _, score in experts]
    most = numbers[0] % 8
    found = _native.prompt_reads(on_device, scores, most)
    assert found == reads.prompt_reads(on_device, scores, most)
    assert len(found) <= most
    assert _native.rank_last(on_device, scores) == reads.rank_last(on_device, scores)
    assert _native.is_prompt(numbers[0]) == reads.is_prompt(numbers[0])
    assert _native.may_lend(*numbers) == reads.may_lend(*numbers)
    for waits in (False, True):
        expected = reads.may_take_room(numbers[0], waits=waits)
        assert _native.may_take_room(numbers[0], waits) == expected


def test_slots_read_what_the_reference_says_on_a_recorded_run(tmp_path: Path) -> None:
    """All layers of each step are known; some experts are still there from the step before."""
    geometry, trace = Geometry(4, 64, 6), read_trace(TRACE)
    store, reader, counts = make_store(geometry), LoadReader(trace), Counter[bool]()
    steps = [reader.loads(step)[:4] for step in list(replay_steps(trace, 4, prompt=1))[:9]]
    for number, (last, loads) in enumerate(pairwise(steps)):
        slots = put_on_disk(store, tmp_path / str(number), 0.3, top_k=6)
        on_device = [bytearray(64) for _ in loads]
        on_device[number % 4][loads[number % 4].experts[0]] = READY
        passing: set[tuple[int, int]] = set()
        for each in (last, loads):
            passing = check_reads(slots, each, on_device, passing, counts)
            slots.native.note_on_device(b"".join(on_device))
    assert min(counts.values()) > 10


def check_reads(
    slots: HostSlots,
    loads: list[LayerLoad],
    on_device: list[bytearray],
    passing: set[tuple[int, int]],
    counts: Counter[bool],
) -> set[tuple[int, int]]:
    """Announce a step to the host slots while transit slots hold `passing`; compare the reads.

    Return what the transit slots hold afterwards.
    """
    slots.native.note_on_device(b"".join(on_device))
    num_shared = len(slots.memory[-1]) - HELD_SLOTS
    had = [set(slots.native.resident(load.layer)) for load in loads]
    used = {(load.layer, expert) for load in loads for expert in load.experts}
    stays = {(layer, expert) for layer, expert in passing if layer == 0} | passing & used
    shared = SharedSlots(num_shared, num_shared - len(stays), len(passing & used))
    coming = []
    for load, has, states in zip(loads, had, on_device, strict=True):
        has = has | {expert for layer, expert in passing if layer == load.layer}
        are_there = bytes(e in has or state == READY for e, state in enumerate(states))
        free = slots.num_slots[load.layer] - len(had[load.layer])
        coming.append(ComingUse(load.layer, load.experts, are_there, free))
    expected = reads.known_reads(coming, shared)
    before = slots.native.counts().read_bytes
    slots.native.expect([load.experts for load in loads])
    assert slots.native.counts().read_bytes - before == len(expected) * slots.slot_bytes
    for layer, has in enumerate(had):
        entered = {each.expert for each in expected if each.layer == layer and not each.passes}
        assert set(slots.native.resident(layer)) == has | entered
    for each in expected:
        held = slots.native.hold(each.layer, each.expert)
        held.wait()
        held.let_go()
    counts.update(each.passes for each in expected)
    return stays | {(each.layer, each.expert) for each in expected if each.passes}
