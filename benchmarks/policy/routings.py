"""Routing of many kinds to measure eviction on: real traces rearranged, and synthetic ones.

Real traces: whole; cut into sequences of 20 to 40 tokens in random order; two tasks in turns of 16
tokens; expert ids permuted every 2,000 tokens, as if the model changed; four layers merged into
one, which makes a model of four times the experts from real routing. Synthetic: Zipf (each layer in
its own order); uniform; a loop that just exceeds half the slots; phases of 300 tokens with a Zipf
order each. For large models there are three kinds of weak locality: tokens keep some experts of the
token before and draw the others from all, so that LRU is hard to beat; requests slightly prefer
some experts; and such requests repeat each other except for every tenth token. Every generator is
seeded, so routing repeats exactly.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tandem.trace import RoutingTrace, TraceMeta

Ints = npt.NDArray[np.int64]
SHORTEST, LONGEST = 20, 40  # tokens of a sequence that was cut
TURN_TOKENS = 16
MODEL_TOKENS = 2000  # between two permutations of the experts
PHASE_TOKENS = 300
MERGED_LAYERS = 4
SYNTHETIC_EXPERTS = (32, 128, 512)
SYNTHETIC_TOKENS, SYNTHETIC_LAYERS = 16384, 4
LARGE_MODELS = (256, 512)  # experts
REQUEST_TOKENS = 128
KEPT = 0.2  # share of a token's experts that the next one keeps
PREFERENCE = 0.5  # standard deviation of a request's preferences, beside one of 1.3 by token
REQUESTS, CHANGED = 24, 0.1  # requests that others repeat, and the share of tokens that differ


def made(
    name: str, experts: npt.NDArray[np.integer], num_experts: int, lengths: Ints | None = None
) -> RoutingTrace:
    """Return a trace of experts (tokens, layers, top_k) in sequences of these lengths."""
    tokens, layers, top_k = experts.shape
    if lengths is None:
        lengths = np.full(tokens // 128, 128)
    return RoutingTrace(
        meta=TraceMeta(model=name, n_moe_layers=layers, n_experts=num_experts, top_k=top_k),
        experts=experts[: lengths.sum()].astype(np.uint16),
        seq_offsets=np.concatenate(([0], np.cumsum(lengths))),
    )


def layers_of(trace: RoutingTrace, first: int, last: int) -> RoutingTrace:
    """Return layers first .. last - 1 as a model, without weights and ids."""
    meta = dataclasses.replace(trace.meta, n_moe_layers=last - first)
    return RoutingTrace(
        meta=meta, experts=trace.experts[:, first:last], seq_offsets=trace.seq_offsets
    )


def cut(trace: RoutingTrace, seed: int = 0) -> RoutingTrace:
    """Return a trace cut into short sequences in random order."""
    draw = np.random.default_rng(seed)
    pieces: list[Ints] = []
    at = 0
    while at + LONGEST <= trace.num_tokens:
        length = int(draw.integers(SHORTEST, LONGEST + 1))
        pieces.append(np.arange(at, at + length))
        at += length
    pieces = [pieces[i] for i in draw.permutation(len(pieces))]
    return taken(trace, pieces)


def interleaved(trace: RoutingTrace) -> RoutingTrace:
    """Return the first and the second half of a trace's sequences in turns of 16 tokens."""
    middle = int(trace.seq_offsets[trace.num_sequences // 2])
    turns = min(middle, trace.num_tokens - middle) // TURN_TOKENS
    starts = [start + TURN_TOKENS * turn for turn in range(turns) for start in (0, middle)]
    order = np.concatenate([np.arange(start, start + TURN_TOKENS) for start in starts])
    pieces = np.split(order, range(8 * TURN_TOKENS, len(order), 8 * TURN_TOKENS))
    return taken(trace, pieces)


def permuted(trace: RoutingTrace, seed: int = 0) -> RoutingTrace:
    """Return a trace whose expert ids are permuted in each layer every 2,000 tokens."""
    draw = np.random.default_rng(seed)
    experts = np.empty_like(trace.experts)
    for start in range(0, trace.num_tokens, MODEL_TOKENS):
        part = slice(start, start + MODEL_TOKENS)
        for layer in range(trace.meta.n_moe_layers):
            renamed = draw.permutation(trace.meta.n_experts)
            experts[part, layer] = renamed[trace.experts[part, layer]]
    return dataclasses.replace(trace, experts=experts)


def merged(trace: RoutingTrace, keep: int = 2, num_merged: int = MERGED_LAYERS) -> RoutingTrace:
    """Return a model with merged layers: from each layer the `keep` heaviest experts of a token."""
    assert trace.weights is not None
    layers = trace.meta.n_moe_layers // num_merged
    order = np.argsort(-trace.weights.astype(np.float32), axis=-1, kind="stable")[..., :keep]
    best = np.take_along_axis(trace.experts, order, axis=-1).astype(np.int64)
    best = best[:, : layers * num_merged].reshape(-1, layers, num_merged, keep)
    best = best + trace.meta.n_experts * np.arange(num_merged)[:, None]
    experts = best.reshape(-1, layers, num_merged * keep)
    name = f"{trace.meta.model}, merged"
    return made(name, experts, num_merged * trace.meta.n_experts, np.diff(trace.seq_offsets))


def taken(trace: RoutingTrace, pieces: list[Ints]) -> RoutingTrace:
    """Return a trace whose sequences are these tokens of another trace."""
    index = np.concatenate(pieces)
    offsets = np.concatenate(([0], np.cumsum([len(piece) for piece in pieces])))
    return dataclasses.replace(
        trace,
        experts=trace.experts[index],
        seq_offsets=offsets,
        weights=None if trace.weights is None else trace.weights[index],
        token_ids=None if trace.token_ids is None else trace.token_ids[index],
    )


def synthetic(num_experts: int) -> Iterator[RoutingTrace]:
    """Yield one trace of each synthetic kind; top-k is an eighth of the experts, at most 8."""
    top_k = min(8, num_experts // 8)
    shape = (SYNTHETIC_TOKENS, SYNTHETIC_LAYERS)
    zipf = -np.log(np.arange(1, num_experts + 1))
    draw = np.random.default_rng(num_experts)
    scores = draw.gumbel(size=(*shape, num_experts))
    orders = np.stack([draw.permutation(num_experts) for _ in range(SYNTHETIC_LAYERS)])
    yield made(f"uniform, {num_experts}", _best(scores, top_k), num_experts)
    yield made(f"zipf, {num_experts}", _best(scores + zipf[orders], top_k), num_experts)
    for start in range(0, SYNTHETIC_TOKENS, PHASE_TOKENS):
        phase = np.stack([draw.permutation(num_experts) for _ in range(SYNTHETIC_LAYERS)])
        scores[start : start + PHASE_TOKENS] += 2 * zipf[phase]
    yield made(f"phases, {num_experts}", _best(scores, top_k), num_experts)
    # One expert more than half the slots hold, in a loop: LRU has no hit there.
    length = num_experts // 2 + top_k
    positions = np.arange(SYNTHETIC_TOKENS)[:, None] * top_k + np.arange(top_k)
    loop = np.broadcast_to((positions % length)[:, None], (*shape, top_k))
    yield made(f"loop, {num_experts}", loop, num_experts)


def weakly_local(num_experts: int) -> Iterator[RoutingTrace]:
    """Yield one trace of each kind of weak locality, top-8."""
    draw = np.random.default_rng(num_experts)
    shape = (SYNTHETIC_TOKENS, SYNTHETIC_LAYERS, num_experts)
    scores = draw.random(shape)
    is_kept = draw.random((*shape[:2], 8)) < KEPT
    experts = _best(scores[:1], 8)[0]
    sticky = [experts]
    for token in range(1, SYNTHETIC_TOKENS):
        if token % REQUEST_TOKENS:
            layers, places = np.nonzero(is_kept[token])
            scores[token, layers, experts[layers, places]] = 1.0
        experts = _best(scores[token], 8)
        sticky.append(experts)
    yield made(f"sticky, {num_experts}", np.stack(sticky), num_experts)
    num_requests = SYNTHETIC_TOKENS // REQUEST_TOKENS
    preferred = PREFERENCE * draw.normal(size=(num_requests, *shape[1:]))
    scores = draw.gumbel(size=shape) + np.repeat(preferred, REQUEST_TOKENS, axis=0)
    weak = _best(scores, 8)
    yield made(f"weak, {num_experts}", weak, num_experts)
    requests = weak.reshape(num_requests, REQUEST_TOKENS, SYNTHETIC_LAYERS, 8)
    repeated = requests[draw.integers(0, REQUESTS, num_requests)].reshape(weak.shape)
    is_changed = draw.random(SYNTHETIC_TOKENS) < CHANGED
    repeated[is_changed] = weak[is_changed]
    yield made(f"repeated, {num_experts}", repeated, num_experts)


def _best(scores: npt.NDArray[np.float64], top_k: int) -> npt.NDArray[np.integer]:
    return np.argpartition(-scores, top_k, axis=-1)[..., :top_k]
