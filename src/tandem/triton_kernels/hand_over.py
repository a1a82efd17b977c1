"""A layer of a decode step in one graph: the GPU computes its hits, the host its misses.

    publish   looks up the chosen experts, and writes the layer's mailbox in mapped host memory
      -> the doorbell: publish rings it (`rings`), or a stream writes it after publish
      -> where the next layer's router is run ahead: `ask` and `publish_guess`, for which
         nothing waits
      -> hits: the vector kernels on the addresses that publish found; 0 means no expert
      -> where misses may be fetched, `take_fetched`: with misses, it waits as combine does, and
         reads the addresses in the host's answer; then the vector kernels on these addresses
      -> combine: waits for `done` (if `most` > 0; otherwise a stream waits before it), and adds up
         rows of the GPU and rows of the host in the router's order

The mailbox's bytes are those of csrc/coordinator/mailbox.hpp. Ordering: `publish` is one program.
The host sees its writes before the doorbell: a stream writes the doorbell after the kernel has
ended; if `publish` rings it, a barrier and a system-wide fence precede it. `combine` reads the
host's writes uncached, after a fence if it has waited itself. Doorbell and `done` are plain stores
and loads, because atomic operations on host memory would take a round trip.

Every wait has a limit. Without it, a stopped process, or a driver that launches one kernel at a
time, would block the GPU, and some drivers kill a program whose kernel runs for seconds. The first
program of `combine` reads `done`; its other programs read `turn`, a word in device memory. `turn`
is 0 when a step begins, the layer's number once the host has answered that layer, and -1 after the
first wait that timed out. Later layers then do not wait, results become NaN, and `given_up` tells
the host so at the end of the step.
"""

import triton
import triton.language as tl
from triton.language import constexpr, tensor

_PAUSE = constexpr("nanosleep.u32 100; mov.u32 $0, 0;")
_FENCE = constexpr("fence.acq_rel.sys; mov.u32 $0, 0;")
_NOW = constexpr("mov.u64 $0, %globaltimer;")  # in nanoseconds
_LOST = constexpr(-1)


@triton.jit
def ring(doorbell: tensor, on_gpu: constexpr) -> None:
    """Set a word to 1; the host sees all earlier writes of this program before that write."""
    tl.debug_barrier()  # all threads' writes come before the ring
    if on_gpu:
        tl.inline_asm_elementwise(
            _FENCE, "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.store(doorbell, 1)


@triton.jit
def wait_for(word: tensor, expected: tensor, most: constexpr, on_gpu: constexpr) -> tensor:
    """Wait, within a limit, until a word is `expected` or -1; return its value.

    Afterwards, the host's writes that preceded its write to the word are visible. The limit `most`
    is in nanoseconds of the GPU's clock; in the interpreter, which has no clock and no pauses, it
    is a number of reads.
    """
    value = tl.load(word, volatile=True)
    if on_gpu:
        begin = tl.inline_asm_elementwise(_NOW, "=l", [], dtype=tl.int64, is_pure=False, pack=1)
        waited = begin - begin
        while (value != expected) & (value != _LOST) & (waited < most):
            tl.inline_asm_elementwise(
                _PAUSE, "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
            )
            value = tl.load(word, volatile=True)
            now = tl.inline_asm_elementwise(_NOW, "=l", [], dtype=tl.int64, is_pure=False, pack=1)
            waited = now - begin
        tl.inline_asm_elementwise(_FENCE, "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1)
    else:
        looks = 0
        while (value != expected) & (value != _LOST) & (looks < most):
            value = tl.load(word, volatile=True)
            looks += 1
    return value


@triton.jit
def wait_for_host(
    done: tensor,
    turn: tensor,
    given_up: tensor,
    number: tensor,
    most: constexpr,
    on_gpu: constexpr,
) -> tensor:
    """Wait until the host has answered the layer of this number; return whether it has.

    Only the first program reads host memory, and sets the word `turn` for the other programs. If
    all programs read host memory, their reads would delay copies on the link.
    """
    state = tl.load(turn, volatile=True)
    if tl.program_id(0) + tl.program_id(1) == 0:
        if state != _LOST:
            answer = wait_for(done, 1, most, on_gpu)
            state = tl.where(answer == 1, number, _LOST)
            tl.store(turn, state)
    else:
        state = wait_for(turn, number, most, on_gpu)
    is_answered = state == number
    if not is_answered:
        tl.store(turn, _LOST)
        tl.store(given_up, 1)
    return is_answered


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
    """Publish a layer: write its choice and hits to the mailbox. There is one program.

    The router's choice and weights are (n_tokens, top_k), `hidden` is (n_tokens, hidden_size),
    `address_of` (num_experts,) int64. The kernels of the hits read `addresses` (n_tokens * top_k,)
    int64. The other tensors are the layer's mailbox, and `shared_hidden`, which all layers share.
    An entry of `address_of` is read once per routed token, so that all later kernels use the same
    address.
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
def ask(
    hidden: tensor,
    residual: tensor,
    weight: tensor,
    bias: tensor,
    scores: tensor,
    num_cols: constexpr,
    num_experts: constexpr,
    block_cols: constexpr,
    block_experts: constexpr,
    has_bias: constexpr,
    scoring: constexpr,
) -> None:
    """Write weight (num_experts, num_cols) @ (hidden + residual) + bias to `scores`.

    `hidden` is (n_tokens, num_cols), `residual` (num_cols,) fp32, `scores` (n_tokens, num_experts).
    A program is (some experts, token).
    `scoring` is applied before the bias is added: 0 nothing, 1 a sigmoid, 2 the root of a softplus.
    """
    row = tl.program_id(1).to(tl.int64)
    expert = tl.program_id(0) * block_experts + tl.arange(0, block_experts)
    is_expert = expert < num_experts
    total = tl.full((block_experts,), 0.0, dtype=tl.float32)
    for start in range(0, num_cols, block_cols):
        col = start + tl.arange(0, block_cols)
        is_col = col < num_cols
        state = tl.load(hidden + row * num_cols + col, mask=is_col, other=0.0).to(tl.float32)
        state += tl.load(residual + col, mask=is_col, other=0.0)
        at = expert[:, None].to(tl.int64) * num_cols + col[None, :]
        some = tl.load(weight + at, mask=is_expert[:, None] & is_col[None, :], other=0.0)
        total += tl.reduce(some.to(tl.float32) * state[None, :], 1, tl.standard._sum_combine)
    below = tl.exp(tl.where(total > 0.0, -total, total))
    if scoring == 1:
        total = tl.where(total > 0.0, 1.0, below) / (1.0 + below)
    if scoring == 2:
        total = tl.sqrt(tl.where(total > 0.0, total, 0.0) + tl.log(1.0 + below))
    if has_bias:
        total += tl.load(bias + expert, mask=is_expert, other=0.0).to(tl.float32)
    tl.store(scores + row * num_experts + expert, total, mask=is_expert)


@triton.jit
def publish_guess(
    scores: tensor,
    top_k_index: tensor,
    guess: tensor,
    guessed: tensor,
    num_tokens: constexpr,
    top_k: constexpr,
    num_experts: constexpr,
    num_scores: constexpr,
    width: constexpr,
    on_gpu: constexpr,
) -> None:
    """Publish the experts with the largest scores as a guess of what the next layer will use.

    `scores` are (n_tokens, num_scores), the guess is (n_tokens, top_k) int32. Tokens whose choice
    in `top_k_index` (n_tokens, top_k) begins with padding get -1. There is one program.
    """
    place = tl.arange(0, width)
    for row in range(num_tokens):
        first = tl.load(top_k_index + row * top_k)
        is_padding = (first < 0) | (first >= num_experts)
        left = tl.load(
            scores + row * num_scores + place, mask=place < num_scores, other=float("-inf")
        )
        for k in tl.static_range(top_k):
            most = tl.reduce(left, 0, tl.standard._elementwise_max)
            best = tl.reduce(tl.where(left == most, place, width), 0, tl.standard._elementwise_min)
            tl.store(guess + row * top_k + k, tl.where(is_padding, -1, best).to(tl.int32))
            left = tl.where(place == best, float("-inf"), left)
    ring(guessed, on_gpu)


@triton.jit(do_not_specialize=["number"])
def take_fetched(
    done: tensor,
    turn: tensor,
    given_up: tensor,
    number: tensor,
    fetched: tensor,
    top_k_index: tensor,
    addresses: tensor,
    new_addresses: tensor,
    num_choices: constexpr,
    choice_width: constexpr,
    num_experts: constexpr,
    most: constexpr,
    on_gpu: constexpr,
) -> None:
    """Read the addresses of missed experts that the host has copied to the GPU.

    Must run after the hits' kernels, which read `addresses` as well. There is one program.
    `fetched` is in the layer's mailbox. The second launch of the vector kernels reads
    `new_addresses` (n_tokens * top_k,) int64, 0 where the host has computed the row. These
    addresses are also written to `addresses`, for `combine`. A layer without misses does not wait.
    `most` and `number` are as in `combine`.
    """
    place = tl.arange(0, choice_width)
    is_there = place < num_choices
    chosen = tl.load(top_k_index + place, mask=is_there, other=-1)
    address = tl.load(addresses + place, mask=is_there, other=0)
    is_miss = (chosen >= 0) & (chosen < num_experts) & (address == 0)
    found = address - address
    num_misses = tl.reduce(is_miss.to(tl.int32), 0, tl.standard._sum_combine)
    if num_misses != 0:
        is_answered = num_misses != 0
        if most > 0:
            is_answered = wait_for_host(done, turn, given_up, number, most, on_gpu)
        found = tl.load(fetched + place, mask=is_miss & is_answered, other=0, volatile=True)
    tl.store(new_addresses + place, found, mask=is_there)
    tl.store(addresses + place, address + found, mask=is_there)


@triton.jit(do_not_specialize=["number"])
def combine(
    done: tensor,
    turn: tensor,
    given_up: tensor,
    number: tensor,
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
    most: constexpr,
    on_gpu: constexpr,
) -> None:
    """Write each token's weighted sum of results, in order of k, to out (n_tokens, num_cols).

    If `most` (see `wait_for`) is not 0, the kernel waits for the host before it reads `results`;
    `number` is the layer's number, counted from 1.

    `rows` (GPU) and `results` (host) are (n_tokens * top_k, num_cols) fp32. A routed token whose
    expert has an address takes its result from `rows`, any other from `results`; padding adds
    nothing. A program is (block of columns, token). Each product and each sum is rounded
    separately, as on the CPU, if the kernel is compiled without fused multiply-add. All results are
    requested before the first is added, because each of the host's takes a microsecond over the
    link.
    """
    token = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * block_cols + tl.arange(0, block_cols)
    mask = col < num_cols
    scales = ()
    are_here = ()
    are_hosts = ()
    for k in tl.static_range(top_k):
        pair = token * top_k + k
        expert, address = tl.load(top_k_index + pair), tl.load(addresses + pair)
        scales = scales + (tl.load(top_k_weights + pair).to(tl.float32),)
        are_here = are_here + (address != 0,)
        are_hosts = are_hosts + ((address == 0) & (expert >= 0) & (expert < num_experts),)
    parts = ()
    for k in tl.static_range(top_k):
        at = (token * top_k + k) * num_cols + col
        parts = parts + (tl.load(rows + at, mask=mask & are_here[k], other=0.0),)
    total = tl.full((block_cols,), 0.0, dtype=tl.float32)
    if most > 0:
        is_answered = wait_for_host(done, turn, given_up, number, most, on_gpu)
        total = tl.where(is_answered, total, float("nan"))
    theirs = ()
    for k in tl.static_range(top_k):
        at = (token * top_k + k) * num_cols + col
        theirs = theirs + (
            tl.load(results + at, mask=mask & are_hosts[k], other=0.0, volatile=True),
        )
    for k in tl.static_range(top_k):
        total += tl.where(are_here[k] | are_hosts[k], scales[k] * (parts[k] + theirs[k]), 0.0)
    tl.store(out + token * num_cols + col, total.to(out.dtype.element_ty), mask=col < num_cols)
