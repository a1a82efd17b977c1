"""Hands numbers from a GPU to a thread of the host and back, through mapped pinned memory.

The smallest kernels of it, by which `benchmarks.gpu.hand_off` learns what a machine can do:

    publish (numbers, then the flag) -> the host sees the flag, so it sees the numbers
    -> numbers of the host, then its flag -> wait_for -> collect

One program each. `collect` reads past the caches: what the host has written since counts.
"""

import triton
import triton.language as tl
from triton.language import constexpr, tensor

_PAUSE = constexpr("nanosleep.u32 100; mov.u32 $0, 0;")


@triton.jit
def publish(
    numbers: tensor, flag: tensor, source: tensor, count: constexpr, sets_flag: constexpr
) -> None:
    """Write `count` numbers, each plus one; then the flag, unless a stream's write follows."""
    place = tl.arange(0, count)
    tl.store(numbers + place, tl.load(source + place) + 1)
    if sets_flag:
        tl.debug_barrier()  # the numbers of all threads, before one of them releases
        tl.atomic_xchg(flag, 1, sem="release", scope="sys")


@triton.jit
def wait_for(flag: tensor, seen: tensor, most_polls: constexpr, has_pause: constexpr) -> None:
    """Wait until a flag is 1 and reset it; `seen` tells whether it came within so many looks."""
    value = tl.load(flag, volatile=True)
    polls = 0
    while (value != 1) & (polls < most_polls):
        if has_pause:
            tl.inline_asm_elementwise(
                _PAUSE, "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
            )
        value = tl.load(flag, volatile=True)
        polls += 1
    tl.store(seen, value)
    tl.store(flag, 0)


@triton.jit
def collect(numbers: tensor, out: tensor, count: constexpr, is_volatile: constexpr) -> None:
    """Copy `count` numbers of the host to memory of the device."""
    place = tl.arange(0, count)
    tl.store(out + place, tl.load(numbers + place, volatile=is_volatile))
