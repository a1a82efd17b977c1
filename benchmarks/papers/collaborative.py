"""Paper 2's hit rates, readings of its table I, thread scaling and speed-ups.

There are no traces of its models: its policies run on ours, on a profile made from its table I.
"""

import dataclasses
import sys
from collections.abc import Sequence

import numpy as np
from benchmarks.papers.replays import Replays, plain
from benchmarks.papers.table import NONE, Table, over, shown
from benchmarks.policy.routings import layers_of

from tandem.hardware.profiles import load_profile
from tandem.policy.cost import HardwareProfile, ShapeCosts
from tandem.policy.eviction import EVICTIONS
from tandem.policy.plan import LayerLoad
from tandem.sim.hit_rate import demand_loads, hit_rate
from tandem.sim.replay import Tally
from tandem.sim.systems import SimulatedSettings, System
from tandem.trace import RoutingTrace

PROFILE = load_profile("collab-testbed")
# Table I, milliseconds: by threads of the CPU; the GPU; the copy.
CPU_MS = {1: 44.1, 2: 25.5, 4: 18.3, 8: 15.8, 16: 11.0, 24: 7.3}
GPU_MS, COPY_MS = 0.3, 28.0
# Decode tok/s by threads: Mixtral (14 layers of 4), Phi-3.5-MoE (16 layers of 8).
MIXTRAL, PHI = {2: 2.1, 8: 3.8, 24: 4.8}, {2: 4.2, 8: 8.1, 24: 10.4}
LAYERS, PER_LAYER = 32, 2  # of both; experts of a token
INDEXES = {"Mixtral": 14, "Phi-3.5-MoE": 16}
PHI_SIZE = 152 / 340  # of a Mixtral expert
ON_DEMAND = {"Mixtral": 1.1, "Phi-3.5-MoE": 2.4}  # Pre-gated MoE, copies hidden as far as can be
QUARTER = 0.25  # of the experts on its GPU: 56 of 256, 128 of 512
INDEXED = System(
    "paper 2, half of the layers",
    SimulatedSettings(
        assignment="hits-on-gpu",
        eviction="indexed-copy-on-miss",
        pool="shared",
        never_worse_than_cpu=False,
    ),
    "empty",
)
POLICIES = {"fifo": "its default", "copy-on-miss": "its LRU", "next-use": "Tandem's"}


def best_two(trace: RoutingTrace) -> RoutingTrace:
    """Return a trace of each token's two heaviest experts: a top-2 model, as in the paper."""
    assert trace.weights is not None
    order = np.argsort(-trace.weights.astype(np.float32), axis=-1, kind="stable")[..., :PER_LAYER]
    return dataclasses.replace(
        trace,
        meta=dataclasses.replace(trace.meta, top_k=PER_LAYER),
        experts=np.take_along_axis(trace.experts, order, axis=-1),
        weights=np.take_along_axis(trace.weights, order, axis=-1),
    )


def random_hits(num_experts: int, ways: int) -> tuple[float, float]:
    """Return the chance of at least one hit, and of two, in a cache of random experts."""
    e, m = num_experts, ways
    return 1 - (e - m) / e * (e - m - 1) / (e - 1), m / e * (m - 1) / (e - 1)


def hits(trace: RoutingTrace, eviction: str, ways: int, tokens: int) -> tuple[float, float, float]:
    """Return the shares of layers with at least one and with two hits, and of experts that hit."""
    geometry = trace.meta.geometry
    counts = [0, 0, 0]  # of layers by hits

    def watch(
        load: LayerLoad, held: Sequence[int], changes: list[tuple[int, int]], rule: str
    ) -> None:
        counts[len(held)] += 1

    rate = hit_rate(
        demand_loads(trace, 1, tokens),
        geometry,
        [ways] * geometry.num_layers,
        EVICTIONS.factory(eviction)(geometry),
        watch,
    )
    layers = sum(counts)
    return (counts[1] + counts[2]) / layers, counts[2] / layers, rate


def hit_rates(replays: Replays) -> Table:
    """Return hits of two experts per layer at batch 1, half of the experts resident, all layers."""
    head = ["half of the experts resident", "at least one of two", "both", "of all", "over random"]
    rows = []
    for name, trace in replays.traces.items():
        pairs = best_two(trace)
        ways = trace.meta.n_experts // 2
        one, both = random_hits(trace.meta.n_experts, ways)
        rows.append([f"{name}, random", f"{one:.3f}", f"{both:.3f}", "0.500", "1.00"])
        for eviction, what in POLICIES.items():
            print(f"{name}, two experts: {eviction}", file=sys.stderr, flush=True)
            found = hits(pairs, eviction, ways, 2 * replays.tokens)
            cells = [f"{share:.3f}" for share in found]
            rows.append([f"{name}, `{eviction}` ({what})", *cells, f"{found[2] / 0.5:.2f}"])
    return Table(head, rows)


def indexes(replays: Replays) -> Table:
    """Return the share of a token's experts on the GPU, by the placement of a quarter of slots."""
    parts = (1, 2, 4)
    rows = []
    for name, trace in replays.traces.items():
        pairs, geometry = best_two(trace), trace.meta.geometry
        cells = []
        for part in parts:
            layers = geometry.num_layers // part
            ways = geometry.num_experts * part // 4
            print(f"{name}, {layers} layers of {ways}", file=sys.stderr, flush=True)
            cached = layers_of(pairs, 0, layers)
            rate = hits(cached, "copy-on-miss", ways, 2 * replays.tokens)[2]
            share = rate * layers / geometry.num_layers
            cells.append(f"{share:.3f} ({layers} x {ways})")
        rows.append([name, *cells])
    head = ["a quarter of all slots, N x M", "all layers", "half of them", "a quarter of them"]
    return Table(head, rows)


def reuse(replays: Replays) -> Table:
    """Return how often consecutive tokens and layers choose the same experts."""
    names = list(replays.traces)
    rows = []
    for what, stated, of_two in (
        ("of a token's two experts, used by the token before", "40 to 60 %", True),
        ("the same of all of its experts", NONE, False),
    ):
        cells = []
        for name in names:
            trace = best_two(replays.traces[name]) if of_two else replays.traces[name]
            cells.append(f"{_shared_with_last(trace):.0%}")
        rows.append([what, stated, *cells])
    cells = []
    for name in names:
        chosen = np.sort(best_two(replays.traces[name]).experts, axis=-1)
        cells.append(f"{(chosen[:, 1:] == chosen[:, :-1]).all(-1).mean():.1%}")
    rows.append(["layers whose two experts have the numbers of the layer above", "44 %", *cells])
    return Table(["reuse", "theirs", *names], rows)


def _shared_with_last(trace: RoutingTrace) -> float:
    now, last = trace.experts[1:], trace.experts[:-1]
    is_shared = (now[..., :, None] == last[..., None, :]).any(-1)
    is_start = np.isin(np.arange(1, trace.num_tokens), trace.seq_offsets)
    return float(is_shared[~is_start].mean())


def reading(replays: Replays) -> Table:
    """Return the implications of table I, read as times of one expert, and of two together."""
    rows = []
    for model, stated in ON_DEMAND.items():
        seconds = _size(model) * COPY_MS / 1000
        cells = [f"{1 / (LAYERS * seconds * count):.2f}" for count in (PER_LAYER, 1)]
        rows.append([f"{model}, every expert copied", f"{stated}", *cells])
    for model, speeds in (("Mixtral", MIXTRAL), ("Phi-3.5-MoE", PHI)):
        for threads, stated in speeds.items():
            limits = [_limits(model, threads, count) for count in (PER_LAYER, 1)]
            cells = [f"{least:.1f} .. {most:.1f}" for least, most in limits]
            rows.append([f"{model}, {threads} threads", f"{stated}", *cells])
    head = ["tok/s", "theirs", "table I is of one expert", "table I is of a layer's two"]
    return Table(head, rows)


def _size(model: str) -> float:
    return 1.0 if model == "Mixtral" else PHI_SIZE


def _limits(model: str, threads: int, per_layer: int) -> tuple[float, float]:
    """Return the speeds without hits, and with hits in every layer that has a cache."""
    cpu, gpu = (_size(model) * ms * per_layer / 1000 for ms in (CPU_MS[threads], GPU_MS))
    dense = LAYERS * PROFILE.shape("mixtral-8x7b").dense_seconds[0]
    cached = INDEXES[model]
    return 1 / (LAYERS * cpu + dense), 1 / ((LAYERS - cached) * cpu + cached * gpu + dense)


def machine(threads: int) -> HardwareProfile:
    """Return the testbed with this many threads; table I is read as times of two experts."""
    scale = CPU_MS[threads] / CPU_MS[24] / PER_LAYER

    def of(shape: ShapeCosts) -> ShapeCosts:
        return dataclasses.replace(
            shape,
            cpu_seconds=tuple(seconds * scale for seconds in shape.cpu_seconds),
            link_seconds_per_expert=shape.link_seconds_per_expert / PER_LAYER,
        )

    return dataclasses.replace(
        PROFILE,
        name=f"{PROFILE.name}, {threads} threads",
        cpu_threads=threads,
        link_bytes_per_second=PROFILE.link_bytes_per_second * PER_LAYER,
        shapes=tuple(of(shape) for shape in PROFILE.shapes),
    )


def threads(replays: Replays) -> Table:
    """Return decode speeds by number of CPU threads, also relative to all threads."""
    head = ["decode tok/s (of 24 threads)", *[f"{count}" for count in CPU_MS]]
    rows = []
    for model, stated in (("Mixtral", MIXTRAL), ("Phi-3.5-MoE", PHI)):
        cells = [_of_all(stated.get(count), stated[24]) for count in CPU_MS]
        rows.append([f"paper 2, {model}", *cells])
    for name in replays.traces:
        for system in (INDEXED, replays.system(name, "tandem")):
            speeds = [_speed(replays, name, system, count) for count in CPU_MS]
            cells = [_of_all(speed, speeds[-1]) for speed in speeds]
            rows.append([f"here, {name}: {system.name}", *cells])
    return Table(head, rows)


def _of_all(speed: float | None, all_threads: float | None) -> str:
    share = over(speed, all_threads)
    return NONE if share is None else f"{speed:.1f} ({share:.2f})"


def _speed(replays: Replays, name: str, system: System, num_threads: int) -> float | None:
    tally: Tally | None = replays.tally(
        name, system, batch=1, gpu_experts=QUARTER, profile=machine(num_threads)
    )
    return None if tally is None else tally.decode_tokens_per_second()


def speedups(replays: Replays) -> Table:
    """Return paper 2's and Tandem's speed over others, 24 threads, a quarter of the experts."""
    on_demand = plain("gpu-only", start="empty")
    rows = []
    for what, stated, other in (
        ("every expert copied (Pre-gated MoE)", "4.4, 4.3", on_demand),
        ("Fiddler", "1.6", None),
        ("all on the CPU", NONE, plain("cpu-only", start="empty")),
    ):
        cells = []
        for name in replays.traces:
            base = _speed(replays, name, other or replays.system(name, "fiddler"), 24)
            ours = [INDEXED, *[replays.system(name, each) for each in ("paper 2", "tandem")]]
            ratios = [over(_speed(replays, name, system, 24), base) for system in ours]
            cells.append(", ".join(shown(ratio, ".2f") for ratio in ratios))
        rows.append([what, stated, *cells])
    names = [f"{name}: paper 2, in all layers, Tandem" for name in replays.traces]
    return Table(["speed over", "theirs", *names], rows)
