"""A layer of a decode step in one graph: the GPU computes its hits, the host the misses, meanwhile.

    publish   looks the chosen experts up, writes the layer's mailbox in mapped host memory
      -> the doorbell: a stream's write behind it, or publish itself (`rings`)
      -> hits: the vector kernels on the addresses that publish has used; 0 is no expert
      -> wait: a stream's wait for `done` and its reset, or `wait_for`
      -> combine: rows of the GPU and rows of the host, added in the router's order

The mailbox's bytes are csrc/coordinator/mailbox.hpp. Ordering: `publish` is one program, and what
it has written is seen by the host before the doorbell, as the kernel has ended by then; where it
rings itself, a barrier and a release for the whole system stand between. `combine` comes behind the
wait, and reads what the host has written past the caches.
"""

import triton
import triton.language as tl
from triton.language import constexpr, tensor

_PAUSE = constexpr("nanosleep.u32 100; mov.u32 $0, 0;")


@triton.jit
def publish(
    top_k_index: tensor,
    top_k_weights: tensor,
    hidden: tensor,
    address_of: tensor,
    addresses: tensor,
    doorbell: tensor,
    done: tensor,
    choice: tensor,
    is_hit: tensor,
    weights: tensor,
    shared_hidden: tensor,
    num_choices: constexpr,
    choice_width: constexpr,
    num_experts: constexpr,
    num_values: constexpr,
    block_values: constexpr,
    rings: constexpr,
) -> None:
    """Hand a layer over: one program.

    The router's choice and weights are (rows, top_k), `hidden` (rows, hidden_size), `address_of`
    (num_experts,) int64; `addresses` (rows * top_k,) int64 is what the hits read. The others are
    the layer's mailbox and `shared_hidden`, all layers' own. Each entry of the table is read once.
    """
    place = tl.arange(0, choice_width)
    is_there = place < num_choices
    chosen = tl.load(top_k_index + place, mask=is_there, other=-1)
    is_expert = (chosen >= 0) & (chosen < num_experts)
    address = tl.load(address_of + chosen, mask=is_expert, other=0)
    tl.store(addresses + place, address, mask=is_there)
    is_miss = is_expert & (address == 0)
    tl.store(choice + place, chosen.to(tl.int32), mask=is_there)
    tl.store(is_hit + place, 1 - is_miss.to(tl.int32), mask=is_there)
    weight = tl.load(top_k_weights + place, mask=is_there, other=0.0)
    tl.store(weights + place, weight.to(tl.float32), mask=is_there)
    num_misses = tl.reduce(is_miss.to(tl.int32), 0, tl.standard._sum_combine)
    if num_misses == 0:
        tl.store(done, 1)
    else:
        for start in range(0, num_values, block_values):
            value = start + tl.arange(0, block_values)
            some = tl.load(hidden + value, mask=value < num_values, other=0.0)
            tl.store(
                shared_hidden + value,
                some.to(shared_hidden.dtype.element_ty),
                mask=value < num_values,
            )
    if rings:
        tl.debug_barrier()  # what all threads have written, before one of them releases
        tl.atomic_xchg(doorbell, 1, sem="release", scope="sys")


@triton.jit
def wait_for(done: tensor, gave_up: tensor, most_polls: constexpr, has_pause: constexpr) -> None:
    """Wait until `done` is 1 and reset it; counts in `gave_up` if it never came. One program."""
    value = tl.load(done, volatile=True)
    polls = 0
    while (value != 1) & (polls < most_polls):
        if has_pause:
            tl.inline_asm_elementwise(
                _PAUSE, "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
            )
        value = tl.load(done, volatile=True)
        polls += 1
    tl.store(done, 0)
    tl.store(gave_up, tl.load(gave_up) + (value != 1).to(tl.int32))


@triton.jit
def combine(
    rows: tensor,
    results: tensor,
    addresses: tensor,
    top_k_index: tensor,
    top_k_weights: tensor,
    out: tensor,
    num_cols: constexpr,
    top_k: constexpr,
    num_experts: constexpr,
    block_cols: constexpr,
) -> None:
    """Write sum over k of weight * row, first to last, to out (rows, num_cols).

    `rows` and `results` are (rows * top_k, num_cols) fp32: the GPU's where an address was used, the
    host's where an expert had none; padding adds nothing. A program is (block of columns, row).
    Each product and each sum is rounded by itself, as on the CPU, if it is compiled so.
    """
    token = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * block_cols + tl.arange(0, block_cols)
    total = tl.full((block_cols,), 0.0, dtype=tl.float32)
    for k in range(top_k):
        pair = token * top_k + k
        expert, address = tl.load(top_k_index + pair), tl.load(addresses + pair)
        weight = tl.load(top_k_weights + pair).to(tl.float32)
        is_here = address != 0
        is_hosts = (address == 0) & (expert >= 0) & (expert < num_experts)
        at, mask = pair * num_cols + col, col < num_cols
        row = tl.load(rows + at, mask=mask & is_here, other=0.0)
        row += tl.load(results + at, mask=mask & is_hosts, other=0.0, volatile=True)
        total += tl.where(is_here | is_hosts, weight * row, 0.0)
    tl.store(out + token * num_cols + col, total.to(out.dtype.element_ty), mask=col < num_cols)
