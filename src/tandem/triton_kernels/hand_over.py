"""A layer of a decode step in one graph: the GPU computes its hits, the host the misses, meanwhile.

    publish   looks the chosen experts up, writes the layer's mailbox in mapped host memory
      -> the doorbell: publish itself (`rings`), or a stream's write behind it
      -> hits: the vector kernels on the addresses that publish has used; 0 is no expert
      -> combine: waits for `done` (`waits`; else a stream's wait stands before it); rows of the GPU
         and rows of the host, added in the router's order

The mailbox's bytes are csrc/coordinator/mailbox.hpp. Ordering: `publish` is one program, and what
it has written is seen by the host before the doorbell, as the kernel has ended by then; where it
rings itself, a barrier and a fence for the whole system stand between. `combine` reads what the
host has written past the caches, behind a fence where it has waited itself. Doorbell and `done` are
plain stores and loads: atomic operations on the host's memory take a way there and back.
"""

import triton
import triton.language as tl
from triton.language import constexpr, tensor

_PAUSE = constexpr("nanosleep.u32 100; mov.u32 $0, 0;")
_FENCE = constexpr("fence.acq_rel.sys; mov.u32 $0, 0;")


@triton.jit
def ring(doorbell: tensor, on_gpu: constexpr) -> None:
    """Set a word behind all that this program has written, as the host sees it."""
    tl.debug_barrier()  # what all threads have written, before one of them rings
    if on_gpu:
        tl.inline_asm_elementwise(
            _FENCE, "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.store(doorbell, 1)


@triton.jit
def wait_for(done: tensor, most_polls: constexpr, on_gpu: constexpr) -> tensor:
    """Wait until a word of the host's is 1, so many looks at most; return what it is then.

    All that the host has written before is seen behind it. Off a GPU there are no pauses.
    """
    value = tl.load(done, volatile=True)
    polls = 0
    while (value != 1) & (polls < most_polls):
        if on_gpu:
            tl.inline_asm_elementwise(
                _PAUSE, "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
            )
        value = tl.load(done, volatile=True)
        polls += 1
    if on_gpu:
        tl.inline_asm_elementwise(_FENCE, "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1)
    return value


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
    on_gpu: constexpr,
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
    tl.store(done, (num_misses == 0).to(tl.int32))
    if num_misses != 0:
        for start in range(0, num_values, block_values):
            value = start + tl.arange(0, block_values)
            some = tl.load(hidden + value, mask=value < num_values, other=0.0)
            tl.store(
                shared_hidden + value,
                some.to(shared_hidden.dtype.element_ty),
                mask=value < num_values,
            )
    if rings:
        ring(doorbell, on_gpu)


@triton.jit
def combine(
    done: tensor,
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
    waits: constexpr,
    most_polls: constexpr,
    on_gpu: constexpr,
) -> None:
    """Write sum over k of weight * row, first to last, to out (rows, num_cols).

    `rows` and `results` are (rows * top_k, num_cols) fp32: the GPU's where an address was used, the
    host's where an expert had none; padding adds nothing. A program is (block of columns, row).
    Each product and each sum is rounded by itself, as on the CPU, if it is compiled so.
    """
    if waits:
        wait_for(done, most_polls, on_gpu)
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
