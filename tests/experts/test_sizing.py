"""Tests of slot counts from bytes, and of machines with another link or device."""

import pytest

from tandem.core.errors import CapacityError
from tandem.experts.cache.sizing import DeviceMemory, MemoryShare, count_slots
from tandem.experts.measuring.profiler import with_emulated_gpu, with_link
from tests.experts.machines import make_machine

MEMORY = DeviceMemory(total_bytes=1000, free_bytes=500)


@pytest.mark.parametrize(
    ("share", "slots"),
    [
        (MemoryShare(num_bytes=100), 10),
        (MemoryShare(num_bytes=109), 10),
        (MemoryShare(fraction=0.2), 20),
        (MemoryShare(), 45),  # nine tenths of what is free
        (MemoryShare(num_bytes=1000), 60),  # never more than there are experts
    ],
)
def test_slots_fill_the_budget(share: MemoryShare, slots: int) -> None:
    assert count_slots(share, MEMORY, slot_bytes=10, num_experts=60) == slots


def test_dense_parts_are_taken_off_the_budget() -> None:
    share = MemoryShare(num_bytes=100)
    assert count_slots(share, MEMORY, slot_bytes=10, num_experts=60, reserved_bytes=35) == 6
    with pytest.raises(CapacityError, match="gives 100 B after 95 B for the rest, and one expert"):
        count_slots(share, MEMORY, slot_bytes=10, num_experts=60, reserved_bytes=95)


def test_a_slow_link_is_not_slowed_by_the_cpu() -> None:
    profile = make_machine(link_slowdown=2.0).profile
    assert profile.link_bytes_per_second == 1e9
    slow = with_link(profile, 1e8)
    assert slow.link_slowdown_while_computing == 1.0
    assert slow.shapes[0].link_seconds_per_expert == profile.shapes[0].expert_bytes / 1e8
    assert with_link(profile, 1e9).link_slowdown_while_computing == 2.0


def test_an_emulated_device_is_so_much_faster() -> None:
    shape = with_emulated_gpu(make_machine().profile, 4.0).shapes[0]
    assert [4 * seconds for seconds in shape.gpu_seconds] == list(shape.cpu_seconds)
