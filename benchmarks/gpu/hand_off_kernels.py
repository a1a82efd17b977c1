"""Hands numbers from a GPU to a thread of the host and back, through mapped pinned memory.

The smallest kernels of it, by which `benchmarks.gpu.hand_off` learns what a machine can do:

    publish (numbers, then the flag) -> the host sees the flag, so it sees the numbers
    -> numbers of the host, then its flag -> wait_for -> collect

One program each. `collect` reads past the caches: what the host has written since counts.
"""

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from tandem.triton_kernels import hand_over


@triton.jit
def publish(
    numbers: tensor,
    flag: tensor,
    source: tensor,
    count: constexpr,
    sets_flag: constexpr,
    on_gpu: constexpr = True,
) -> None:
    """Write `count` numbers, each plus one; then the flag, unless a stream's write follows."""
    place = tl.arange(0, count)
    tl.store(numbers + place, tl.load(source + place) + 1)
    if sets_flag:
        hand_over.ring(flag, on_gpu)


@triton.jit
def wait_for(flag: tensor, seen: tensor, most_polls: constexpr, on_gpu: constexpr) -> None:
    """Wait until a flag is 1 and reset it; `seen` tells whether it came within so many looks."""
    value = hand_over.wait_for(flag, most_polls, on_gpu)
    tl.store(seen, value)
    tl.store(flag, 0)


@triton.jit
def collect(numbers: tensor, out: tensor, count: constexpr, is_volatile: constexpr) -> None:
    """Copy `count` numbers of the host to memory of the device."""
    place = tl.arange(0, count)
    tl.store(out + place, tl.load(numbers + place, volatile=is_volatile))
