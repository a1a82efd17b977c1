"""Average routing of models, for forecasts without a trace of the model.

Experts have unequal popularity in each layer, and a token repeats some of the previous token's
experts. Both properties lie between those of traces of DeepSeek-V2-Lite and gpt-oss-20b. In these
traces a token shares 25 and 40 % of its experts with the previous token, and the most popular
quarter of experts has 42 and 52 % of all choices. Typical routing in the two models' geometries has
30 and 35 %, and 48 and 46 %.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tandem.policy.plan import Geometry
from tandem.trace import RoutingTrace, TraceMeta

# Standard deviation of log popularity; what an expert of the previous token gains on top.
_POPULARITY_SPREAD = 0.55
_PERSISTENCE = 1.2
SEED = 0
# Of the experts that a router run ahead names, one in so many is wrong. Right are 79.5 and 93.3 %
# in DALI's table 2 (DeepSeek-V2-Lite, Qwen3-30B-A3B), 91 to 92 % on the demo model
# (docs/papers.md).
ONE_WRONG_IN = 6


def typical_routing(
    geometry: Geometry, *, num_sequences: int, num_tokens: int, by_token: Sequence[int] = ()
) -> RoutingTrace:
    """Return a trace of sequences of `num_tokens` tokens; equal arguments give equal traces.

    In the layers `by_token` a choice does not depend on earlier tokens.
    """
    random = np.random.default_rng(SEED)
    shape = (geometry.num_layers, geometry.num_experts)
    popularity = random.normal(0.0, _POPULARITY_SPREAD, shape)
    rows = []
    for _ in range(num_sequences):
        persistent = np.zeros(shape)
        for _ in range(num_tokens):
            # The largest scores after adding Gumbel noise are a sample without replacement.
            scores = popularity + persistent + random.gumbel(size=shape)
            chosen = np.argpartition(-scores, geometry.top_k - 1, axis=1)[:, : geometry.top_k]
            persistent = np.zeros(shape)
            np.put_along_axis(persistent, chosen, _PERSISTENCE, axis=1)
            persistent[[*by_token]] = 0.0
            rows.append(chosen.astype(np.uint16))
    meta = TraceMeta(
        model="typical",
        n_moe_layers=geometry.num_layers,
        n_experts=geometry.num_experts,
        top_k=geometry.top_k,
        by_token=tuple(by_token),
    )
    offsets = np.arange(num_sequences + 1, dtype=np.int64) * num_tokens
    return RoutingTrace(meta=meta, experts=np.stack(rows), seq_offsets=offsets)


def with_guesses(trace: RoutingTrace) -> RoutingTrace:
    """Return the trace with drawn hints for every layer, wrong as often as real hints."""
    random, experts = np.random.default_rng(SEED), trace.experts
    is_wrong = random.random(experts.shape) < 1 / ONE_WRONG_IN
    others = random.integers(0, trace.meta.n_experts, experts.shape)
    guesses = np.where(is_wrong, others, experts).astype(experts.dtype)
    meta = dataclasses.replace(trace.meta, predictors=("residual",))
    return dataclasses.replace(trace, meta=meta, predicted=guesses[:, :, None, :])
