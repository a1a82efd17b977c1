"""Routing that is forced on a model: recorded, recorded and rearranged, or synthetic.

Recorded: a trace of the model's own shape. Rearranged: in a trace with a quarter of the experts,
four layers form one (`benchmarks.policy.routings.merged`), and layers are repeated with other
tokens until there are enough. Synthetic: popularity and co-activation of Qwen3-30B-A3B's experts
over 75,773 tokens (data/traces), with a preference for recently used ones such that LRU has the hit
rate that others report for that model: two thirds with 13 % of the experts in memory. A model with
fewer experts gets the first ones of these; its hit rate is in no report.
"""

import gzip
import json
from pathlib import Path

import numpy as np
from benchmarks.policy.routings import Ints, made, merged

from tandem.trace import RoutingTrace, read_trace

TRACES = Path(__file__).parents[2] / "data" / "traces"
COACTIVATION = TRACES / "coactivation_qwen3-30b-a3b.json.gz"
# Of the synthetic tokens' scores: the length and the weight of recent use.
_KEPT, _RECENT = 0.8, 3.15
_SHIFT_TOKENS = 997  # between a layer and the next one that repeats it


def forced_trace(
    name: str, num_layers: int, num_experts: int, num_tokens: int, top_k: int = 8
) -> RoutingTrace:
    """Return the trace `name` ("synthetic" or a file) for a shape; `SystemExit` if it does not fit.

    A synthetic one has `top_k` experts per token.
    """
    if name == "synthetic":
        return synthetic(num_layers, num_tokens, num_experts, top_k)
    trace = read_trace(name)
    if trace.meta.n_experts * 4 == num_experts:
        trace = merged(trace)
    if trace.meta.n_experts != num_experts:
        raise SystemExit(
            f"{name} is of {trace.meta.n_experts} experts, the shape has {num_experts}; name a "
            "trace of as many or of a quarter, or --routing synthetic"
        )
    return repeated(trace, num_layers)


def repeated(trace: RoutingTrace, num_layers: int) -> RoutingTrace:
    """Return a trace of this many layers: its own, then the same with other tokens' choices."""
    own = trace.experts.astype(np.int64)
    layers = [
        np.roll(own[:, layer % own.shape[1]], -_SHIFT_TOKENS * (layer // own.shape[1]), axis=0)
        for layer in range(num_layers)
    ]
    return made(
        trace.meta.model, np.stack(layers, axis=1), trace.meta.n_experts,
        np.array([len(own)]),
    )  # fmt: skip


def synthetic(
    num_layers: int, num_tokens: int, num_experts: int, top_k: int, seed: int = 0
) -> RoutingTrace:
    """Return routing for Qwen3-30B-A3B's first layers and experts, the same for a seed."""
    found = json.loads(gzip.decompress(COACTIVATION.read_bytes()))
    if num_experts > found["n_expert_per_layer"] or num_layers > len(found["layers"]):
        raise SystemExit(
            f"synthetic routing is of {len(found['layers'])} layers of "
            f"{found['n_expert_per_layer']} experts, the shape has {num_layers} of {num_experts}; "
            "cut it with --layers and --experts"
        )
    layers = found["layers"][:num_layers]
    popularity = np.log([np.maximum(layer["heat"][:num_experts], 1) for layer in layers])
    lift = np.zeros((len(layers), num_experts, num_experts))
    for number, layer in enumerate(layers):
        for a, b, _, factor in layer["pairs"]:
            if max(a, b) < num_experts:
                lift[number, a, b] = lift[number, b, a] = np.log(factor)
    draw = np.random.default_rng(seed)
    rows = np.arange(len(layers))[:, None]
    recent = np.zeros(popularity.shape)
    pairs = np.zeros(popularity.shape)
    tokens: list[Ints] = []
    for _ in range(num_tokens):
        scores = popularity + pairs + _RECENT * recent + draw.gumbel(size=popularity.shape)
        chosen = np.argpartition(-scores, top_k, axis=-1)[:, :top_k]
        pairs = lift[rows, chosen].mean(axis=1)
        recent *= _KEPT
        recent[rows, chosen] += 1 - _KEPT
        tokens.append(chosen)
    experts = np.stack(tokens)
    return made("qwen3-30b-a3b, synthetic", experts, num_experts, np.array([num_tokens]))
