"""Tests of copies by driver calls while captured steps run; the driver has no GPU."""

import random
import time

import pytest
import torch

from tandem.experts.store.host_store import HostStore
from tandem.kernels import _native
from tests.experts.captured import TwinMachine, random_step
from tests.experts.driver_library import DriverLibrary
from tests.experts.machines import make_store
from tests.experts.test_coordinator import check, step_with_copies

NOT_SUPPORTED = 801


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> DriverLibrary:
    return DriverLibrary(tmp_path_factory.mktemp("driver"))


@pytest.mark.parametrize("write_code", [0, NOT_SUPPORTED], ids=["writes", "no writes"])
def test_steps_are_right_whatever_copies_do_meanwhile(
    library: DriverLibrary, store: HostStore, write_code: int
) -> None:
    library.reset(delay=150, write_code=write_code)
    machine = TwinMachine(store, 1, num_slots=6, most_delay=150, library=library.path)
    assert step_with_copies(machine, store, random.Random(write_code)) > 0
    machine.close()
    assert library.num_left == 0


@pytest.mark.parametrize("write_code", [0, NOT_SUPPORTED], ids=["writes", "no writes"])
def test_an_entry_is_seen_at_once_or_in_the_next_step(
    library: DriverLibrary, store: HostStore, write_code: int
) -> None:
    library.reset(write_code=write_code)
    machine = TwinMachine(store, 1, num_slots=1, library=library.path)
    machine.copy(1, 3, 0)
    machine.coordinator.drain_copies()
    address = machine.slots[0].data_ptr()
    assert machine.table[1, 3] == address
    assert machine.seen[1, 3] == (0 if write_code else address)
    step = random_step(1, torch.Generator().manual_seed(0))
    step[1].chosen[0, 0] = 3
    check(machine, store, step)
    assert machine.coordinator.records()[1][2][0] == 1
    machine.close()


def test_large_experts_go_in_parts(library: DriverLibrary) -> None:
    library.reset()
    store = make_store(expert_dtype="bf16")
    parts = -(-store[0].image_bytes // (512 << 10))
    machine = TwinMachine(store, 1, num_slots=1, library=library.path)
    before = library.num_copies
    machine.copy(0, 1, 0)
    machine.coordinator.drain_copies()
    assert library.num_copies - before == parts
    machine.close()


def test_the_next_expert_is_queued_before_the_last_one_has_ended(
    library: DriverLibrary, store: HostStore
) -> None:
    """Otherwise the link would be idle once per expert while the thread wakes up."""
    library.reset()
    machine = TwinMachine(store, 1, num_slots=3, library=library.path)
    before = library.num_copies
    library.hold(holds=True)
    try:
        machine.coordinator.submit([(0, expert, expert, -1) for expert in range(3)])
        end = time.perf_counter() + 20
        while library.num_copies < before + 2 and time.perf_counter() < end:
            time.sleep(1e-3)
        assert library.num_copies >= before + 2
        assert not machine.table.any()
        assert machine.coordinator.take_arrivals() == []
    finally:
        library.hold(holds=False)
    machine.coordinator.drain_copies()
    addresses = [slot.data_ptr() for slot in machine.slots]
    assert machine.table[0, :3].tolist() == addresses
    assert [arrival[:2] for arrival in machine.coordinator.take_arrivals()] == [
        (0, expert) for expert in range(3)
    ]
    machine.close()


def test_what_is_missing_is_a_sentence(library: DriverLibrary) -> None:
    library.reset(hidden="cuEventRecord")
    for path, message in (
        ("libnone.so.9", "cannot load libnone.so.9"),
        ("libc.so.6", "older than CUDA 12"),
        (library.path, "the driver has no cuEventRecord"),
    ):
        with pytest.raises(RuntimeError, match=message):
            _native.DriverLink(path, 0)
    library.reset(has_context=False)
    with pytest.raises(RuntimeError, match="no GPU is current in this thread"):
        _native.DriverLink(library.path, 0)


def test_a_copy_that_fails_is_reported_and_stops_no_step(
    library: DriverLibrary, store: HostStore
) -> None:
    library.reset(copy_code=719)
    machine = TwinMachine(store, 1, num_slots=1, library=library.path)
    machine.copy(0, 1, 0)
    machine.coordinator.drain_copies()
    message = "cuMemcpyHtoDAsync returned 719, unspecified launch failure"
    assert message in machine.coordinator.copy_error()
    check(machine, store, random_step(1, torch.Generator()))
    machine.close()
    library.reset()
