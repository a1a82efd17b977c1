"""Steps that verify drafted tokens: python -m benchmarks.generation.verification SHAPE

Steps of 1 to 4 tokens of one sequence, in turns, on random weights of a released shape. Routing
follows a trace (--trace FILE), or two tokens touch 1.7 and three 2.35 times the experts of one. A
model of --layers layers and one of one layer are timed, and the whole model is extrapolated. For an
MTP layer, the shape's own layer with a head of 32,768 tokens is computed; its drafts are accepted
with probability .88, the second with .85 after the first. With --sequences the tokens of a step
belong to as many sequences, and nothing is drafted. Times are CPU times of the process, which other
processes disturb less.
"""

import argparse
import dataclasses
import json
import time
from statistics import median
from typing import Any

import numpy as np

import tandem
from tandem.bench.generation import dense_bytes
from tandem.bench.model_shapes import ModelShape, find_shape
from tandem.bench.random_model import build_random_model
from tandem.decode.cpu_slots import CpuSlotPool
from tandem.experts.execution.forced_routing import ForcedRouting
from tandem.hf.config import OffloadConfig
from tandem.hf.runtime import require_runtime
from tandem.trace import RoutingTrace, read_trace

SIZES = (1, 2, 3, 4)
KEPT = (0.88, 0.85)
DEPTH = 256
DRAFT_HEAD = 32_768
# Of a token's experts, how many the token before has too, and the one before that.
SHARED = (0.3, 0.05)


def main() -> None:
    """Measure and print a table; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shape")
    parser.add_argument("--trace")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--sequences", action="store_true", help="a token of each of several")
    parser.add_argument("--wall", action="store_true", help="wall-clock time; on a quiet machine")
    args = parser.parse_args()
    if args.layers < 2:
        parser.error(f"--layers is {args.layers}; two sizes are compared, so at least 2")
    clock = time.perf_counter if args.wall else time.process_time
    shape = find_shape(args.shape)
    total = shape.values["num_hidden_layers"]
    kind = SequenceSteps if args.sequences else Steps
    few = kind(shape.sample(args.layers), args.threads, args.trace)
    one = kind(one_layer(shape), args.threads, args.trace)
    draft = kind(one_layer(shape), args.threads, args.trace, vocabulary=DRAFT_HEAD)
    parts: list[dict[int, list[float]]] = [{n: [] for n in SIZES} for _ in range(3)]
    for _ in range(args.rounds):
        for steps, found in zip((few, one, draft), parts, strict=True):
            for size in SIZES:
                found[size].append(steps.seconds(size, clock))
    a, b, mtp = ({n: median(of[n]) for n in SIZES} for of in parts)
    seconds = {n: b[n] + (total - 1) * (a[n] - b[n]) / (args.layers - 1) for n in SIZES}
    num_bytes = {
        n: one.num_bytes(n)
        + (total - 1) * (few.num_bytes(n) - one.num_bytes(n)) / (args.layers - 1)
        for n in SIZES
    }
    result = {
        "milliseconds": {n: seconds[n] * 1e3 for n in SIZES},
        "time_ratio": {n: seconds[n] / seconds[1] for n in SIZES},
        "bytes_ratio": {n: num_bytes[n] / num_bytes[1] for n in SIZES},
    }
    if not args.sequences:
        result["mtp_milliseconds"] = {n: mtp[n] * 1e3 for n in SIZES}
        result["mtp_over_none"] = with_mtp(seconds, mtp)
    for name, values in result.items():
        print(f"{name:<18} " + "  ".join(f"{n}: {value:.3f}" for n, value in values.items()))
    beyond = (seconds[4] / seconds[1]) / (num_bytes[4] / num_bytes[1])
    print(f"a step of four over one, over its bytes: {beyond:.3f}")
    print(json.dumps({"tandem": tandem.__version__, "shape": args.shape, **result}))


def with_mtp(seconds: dict[int, float], mtp: dict[int, float]) -> dict[int, float]:
    """Return the speeds with one and two drafted tokens, relative to that without."""
    first, second = KEPT
    tokens = {1: 1 + first, 2: 1 + first + first * second}
    # The layer reads the accepted tokens and drafts, then drafts from its own output.
    drafting = {1: mtp[2], 2: mtp[3] + mtp[1]}
    return {n: tokens[n] * seconds[1] / (seconds[n + 1] + drafting[n]) for n in (1, 2)}


def one_layer(shape: ModelShape) -> ModelShape:
    """Return one layer with experts, with full attention if the shape has several kinds."""
    kinds = shape.values.get("layer_types")
    cut = shape.cut(1, first=0 if kinds is None else kinds.index("full_attention"))
    return dataclasses.replace(cut, values=all_with_experts(cut.values))


def all_with_experts(values: dict) -> dict:  # type: ignore[type-arg]
    """Return the shape without dense layers."""
    return {**values, "first_k_dense_replace": 0} if "first_k_dense_replace" in values else values


class Steps:
    """A model with one slot, which is truncated after each step."""

    num_slots = 1

    def __init__(
        self, shape: ModelShape, threads: int | None, trace: str | None, *,
        vocabulary: int | None = None,
    ) -> None:  # fmt: skip
        shape = dataclasses.replace(shape, values=all_with_experts(shape.values))
        offload = OffloadConfig(expert_dtype="int4", threads=threads)
        self._model = build_random_model(
            shape, offload, num_layers=shape.values["num_hidden_layers"],
            vocabulary=vocabulary,
        )  # fmt: skip
        runtime = require_runtime(self._model)
        layers = list(runtime.store)
        self._expert_bytes = layers[0].image_bytes
        num_experts = layers[0].arrivals.num_experts
        top_k = self._model.config.num_experts_per_tok
        self._trace = (
            synthetic(len(layers), num_experts, top_k)
            if trace is None
            else cut(read_trace(trace), len(layers))
        )
        runtime.use(ForcedRouting(runtime.executor, self._trace))
        self._pool = CpuSlotPool(self._model, runtime.threads, self.num_slots, capacity=2 * DEPTH)
        self._pool.prefill({slot: [5] * 8 for slot in range(self.num_slots)})
        self._pool.pretend(DEPTH, 16)
        self._pool.decode({0: 5})
        for size in SIZES:
            while not self._pool._step_of(size).replayed.has_settled:
                self.seconds(size, time.perf_counter)
            assert self._pool._step_of(size).replayed.is_replaying

    def seconds(self, size: int, clock) -> float:  # type: ignore[no-untyped-def]
        """Return the seconds of a step of this many tokens; all but one of them are taken back."""
        start = clock()
        self._pool.verify({0: [7] * size})
        taken: float = clock() - start
        self._pool.keep(0, len(self._pool.held(0)) - size + 1)
        return taken

    def num_bytes(self, size: int) -> float:
        """Return the mean bytes that a step reads: experts, dense weights, states twice."""
        chosen = self._trace.experts
        starts = range(0, min(len(chosen), 2000) - size, size)
        distinct = [
            len(np.unique(chosen[at : at + size, layer]))
            for at in starts
            for layer in range(chosen.shape[1])
        ]
        experts = float(np.mean(distinct)) * chosen.shape[1] * self._expert_bytes
        return float(experts + dense_bytes(self._model) + self._kept_bytes(size))

    def _kept_bytes(self, size: int) -> float:
        cache = self._pool.cache
        return 2 * cache.states.step_bytes + cache.filled_bytes


class SequenceSteps(Steps):
    """A model with a slot for each token of a step."""

    num_slots = SIZES[-1]

    def seconds(self, size: int, clock) -> float:  # type: ignore[no-untyped-def]
        """Return the seconds of a step of one token in each of this many sequences."""
        start = clock()
        self._pool.decode(dict.fromkeys(range(size), 7))
        taken: float = clock() - start
        return taken

    def _kept_bytes(self, size: int) -> float:
        cache = self._pool.cache
        return size * (2 * cache.states.step_bytes + cache.filled_bytes / self.num_slots)


def synthetic(num_layers: int, num_experts: int, top_k: int) -> RoutingTrace:
    """Return routing in which tokens share experts with the two tokens before them."""
    chance = np.random.default_rng(0)
    tokens = np.zeros((4000, num_layers, top_k), dtype=np.uint16)
    kept = [share * top_k for share in SHARED]
    for layer in range(num_layers):
        before: list[list[int]] = [[], []]
        for token in range(len(tokens)):
            chosen: list[int] = []
            for share, past in zip(kept, before, strict=True):
                count = int(share) + (chance.random() < share % 1)
                left = [e for e in past if e not in chosen]
                chosen += [int(e) for e in chance.permutation(left)[:count]]
            known = {*chosen, *before[0], *before[1]}
            fresh = [int(e) for e in chance.permutation(num_experts) if e not in known]
            chosen = (chosen + fresh)[:top_k]
            tokens[token, layer] = chosen
            before = [chosen, before[0]]
    return made(tokens, num_experts)


def made(experts: Any, num_experts: int) -> RoutingTrace:
    """Return a trace of one sequence."""
    from tandem.trace.routing import TraceMeta

    meta = TraceMeta(
        model="synthetic", n_moe_layers=experts.shape[1], n_experts=num_experts,
        top_k=experts.shape[2],
    )  # fmt: skip
    return RoutingTrace(meta=meta, experts=experts, seq_offsets=np.array([0, len(experts)]))


def cut(trace: RoutingTrace, num_layers: int) -> RoutingTrace:
    """Return a trace's middle layers."""
    first = (trace.meta.n_moe_layers - num_layers) // 2
    return made(trace.experts[:, first : first + num_layers], trace.meta.n_experts)


if __name__ == "__main__":
    main()
