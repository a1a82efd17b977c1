"""Tests of the happens-before order at the top of copy_engine.py, rule by rule."""

import random
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tandem.devices.emulated import EmulatedDevice
from tandem.experts.cache.clock import WallClock
from tandem.experts.cache.copy_engine import VirtualCopyEngine, copy_image
from tandem.experts.cache.slots import Slots
from tandem.experts.execution.expert_kernels import ExpertKernels
from tandem.experts.store.host_store import HostStore
from tandem.kernels.dense import CpuThreads
from tandem.policy.plan import Copy
from tandem.sim.timeline import Timeline
from tests.experts.copy_thread import CopyThread
from tests.experts.faults import Disturbance, DisturbedLink
from tests.experts.machines import GEOMETRY, make_machine

NUM_SLOTS = 4
SECONDS = 20.0  # a test that waits this long has failed


@pytest.fixture
def slots(store: HostStore) -> Slots:
    device = EmulatedDevice(1 << 30, ExpertKernels(CpuThreads(num_threads=1)))
    return Slots(device, NUM_SLOTS, store[0].image_bytes)


class Gate:
    """A link that blocks until it is opened, and reports the copy that it is about to make."""

    def __init__(self, is_open: bool = False) -> None:
        self._event = threading.Event()
        self.reached: list[tuple[int, int]] = []
        self.at_gate = threading.Event()
        if is_open:
            self._event.set()

    def open(self) -> None:
        self._event.set()

    def __call__(self, copy: Copy) -> None:
        self.reached.append((copy.layer, copy.expert))
        self.at_gate.set()
        assert self._event.wait(SECONDS)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def link(store: HostStore, slots: Slots, gate: Gate) -> Iterator[CopyThread]:
    disturbance = Disturbance(random.Random(0), fault=gate)
    engine = DisturbedLink(store, slots, GEOMETRY, WallClock(), disturbance=disturbance)
    yield engine
    gate.open()
    slots.forget_uses()
    engine.close()


@pytest.fixture
def virtual(store: HostStore, slots: Slots) -> VirtualCopyEngine:
    machine = make_machine()
    return VirtualCopyEngine(store, slots, GEOMETRY, Timeline(machine.profile, machine.shape))


def image(store: HostStore, expert: int, layer: int = 0) -> Tensor:
    memory = torch.zeros(store[layer].image_bytes, dtype=torch.uint8)
    copy_image(store, layer, expert, memory)
    return memory


def copy(expert: int, slot: int, layer: int = 0) -> Copy:
    return Copy(layer, expert, slot, None)


def test_virtual_bytes_come_only_when_something_waits(
    store: HostStore, slots: Slots, virtual: VirtualCopyEngine
) -> None:
    virtual.submit([copy(3, slot=1)], is_needed=True)
    assert not torch.equal(slots.memory(1), image(store, 3))
    (found,) = virtual.use([1], [3]).images()
    assert torch.equal(found, image(store, 3))


def test_virtual_bytes_come_with_their_arrival(
    store: HostStore, slots: Slots, virtual: VirtualCopyEngine
) -> None:
    clock = virtual._clock
    clock.issue((copy(3, slot=1),))
    virtual.submit([copy(3, slot=1)], is_needed=False)
    assert list(virtual.arrivals()) == []
    clock.run_dense(1)
    clock.run_dense(1)
    assert [arrival[:2] for arrival in virtual.arrivals()] == [(0, 3)]
    assert torch.equal(slots.memory(1), image(store, 3))


def test_a_slot_cannot_be_used_for_another_expert(virtual: VirtualCopyEngine) -> None:
    virtual.submit([copy(3, slot=1)], is_needed=True)
    with pytest.raises(AssertionError, match="slot 1 is for expert 3, not for 4"):
        virtual.use([1], [4])


def test_the_old_expert_cannot_be_used_once_a_copy_is_planned(virtual: VirtualCopyEngine) -> None:
    virtual.submit([copy(3, slot=1)], is_needed=True)
    virtual.drain()
    virtual.submit([copy(5, slot=1)], is_needed=False)
    with pytest.raises(AssertionError, match="slot 1 is for expert 5, not for 3"):
        virtual.use([1], [3])


def test_virtual_bytes_never_overwrite_what_is_in_use(virtual: VirtualCopyEngine) -> None:
    virtual.submit([copy(3, slot=1)], is_needed=True)
    use = virtual.use([1], [3])
    use.images()
    virtual.submit([copy(5, slot=1)], is_needed=True)
    with pytest.raises(AssertionError, match="slot 1 is in use"):
        virtual.drain()
    use.end()
    virtual.drain()


def test_a_slot_is_not_overwritten_while_it_is_in_use(
    store: HostStore, slots: Slots, link: CopyThread, gate: Gate
) -> None:
    gate.open()
    link.submit([copy(3, slot=1)], is_needed=True)
    use = link.use([1], [3])
    (held,) = use.images()
    link.submit([copy(5, slot=1)], is_needed=True)  # must wait for the use
    link.submit([copy(6, slot=2)], is_needed=False)  # need not
    link.use([2], [6]).images()
    assert torch.equal(held, image(store, 3))
    assert (0, 5) not in gate.reached
    use.end()
    link.drain()
    assert torch.equal(slots.memory(1), image(store, 5))


def test_a_use_waits_for_the_last_byte(store: HostStore, link: CopyThread, gate: Gate) -> None:
    link.submit([copy(3, slot=1)], is_needed=True)
    use = link.use([1], [3])
    found: list[Tensor] = []
    reader = threading.Thread(target=lambda: found.append(use.images()[0].clone()))
    reader.start()
    assert gate.at_gate.wait(SECONDS)
    assert found == []
    gate.open()
    reader.join(SECONDS)
    assert torch.equal(found[0], image(store, 3))


def test_two_experts_through_one_slot_are_each_used_in_turn(
    store: HostStore, link: CopyThread, gate: Gate
) -> None:
    """Submit copy, use, copy, use through the ring before any copy has arrived."""
    uses = []
    for expert in (3, 5, 6):
        link.submit([copy(expert, slot=1)], is_needed=True)
        uses.append((expert, link.use([1], [expert])))
    gate.open()
    for expert, use in uses:
        assert torch.equal(use.images()[0], image(store, expert))
        use.end()


def test_only_copies_that_nobody_waits_for_are_cancelled(
    store: HostStore, slots: Slots, link: CopyThread, gate: Gate
) -> None:
    link.submit([copy(0, slot=0)], is_needed=False)  # begins
    assert gate.at_gate.wait(SECONDS)
    link.submit([copy(1, slot=1)], is_needed=True)
    link.submit([copy(2, slot=2)], is_needed=False)
    link.submit([copy(3, slot=3, layer=1)], is_needed=False)
    assert link.cancel(0, [0, 1, 2, 3]) == [2]
    gate.open()
    link.drain()
    assert torch.equal(slots.memory(1), image(store, 1))
    assert not slots.memory(2).any()
    link.submit([copy(4, slot=2)], is_needed=True)
    assert torch.equal(link.use([2], [4]).images()[0], image(store, 4))


def test_an_error_on_the_link_reaches_whoever_waits_submits_or_asks(
    store: HostStore, slots: Slots
) -> None:
    def fail(copy: Copy) -> None:
        raise OSError("the bus is gone")

    disturbance = Disturbance(random.Random(0), fault=fail)
    link = DisturbedLink(store, slots, GEOMETRY, WallClock(), disturbance=disturbance)
    link.submit([copy(0, slot=0)], is_needed=True)
    with pytest.raises(OSError, match="the bus is gone"):
        link.use([0], [0]).images()
    with pytest.raises(RuntimeError, match="the link has stopped: the bus is gone"):
        link.submit([copy(1, slot=1)], is_needed=True)
    with pytest.raises(RuntimeError, match="the link has stopped"):
        link.drain()
    slots.forget_uses()
    link.close()
