"""Measures the costs of operations on this machine: a `HardwareProfile` for one model, in seconds.

The measurements run real kernels on the model's own experts, in their real shapes. Each repetition
uses different experts, so that weights come from memory and not from a processor's caches. Times
are medians.
"""

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from tandem.experts.cache.copy_engine import copy_image
from tandem.experts.execution.batch import CallSide, ExpertFunctions
from tandem.experts.execution.expert_kernels import ExpertKernels
from tandem.experts.execution.layer_call import LayerCall
from tandem.experts.execution.routing import Routing
from tandem.experts.execution.row_memory import RowMemory
from tandem.experts.store.host_memory import total_bytes
from tandem.experts.store.host_store import HostStore
from tandem.experts.store.packed_layer import PackedLayer
from tandem.kernels.cpu import detect_cpu
from tandem.policy.cost import HardwareProfile, ShapeCosts, interpolate
from tandem.policy.plan import Geometry

EMULATED = "emulated"
"""The GPU's name in a profile that was measured without a GPU; all GPU times are the CPU's."""
TOKEN_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
EXPERTS_AT_ONCE = 8
REPETITIONS = 7
# The first token count whose batch takes longer is the last one measured. Beyond it, tables are
# extrapolated linearly.
LONGEST_BATCH_SECONDS = 0.4

DenseSeconds = Callable[[int], float]  # of one layer, by token count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredExperts:
    """A model's experts and what is needed to time them; `kernels` are the CPU's."""

    store: HostStore
    geometry: Geometry
    functions: ExpertFunctions
    kernels: ExpertKernels
    dtype: torch.dtype
    hidden_size: int

    @property
    def num_at_once(self) -> int:
        """The number of experts in measured batches of several experts."""
        return min(EXPERTS_AT_ONCE, self.geometry.num_experts)

    def hidden(self, num_tokens: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return random hidden states: (num_tokens, hidden_size)."""
        return torch.randn(num_tokens, self.hidden_size, device=device).to(self.dtype)


def experts_in_memory(store: HostStore) -> list[Sequence[int]]:
    """Return each layer's experts that are in memory; all its experts if too few are."""
    found: list[Sequence[int]] = []
    for layer in store:
        every = range(layer.arrivals.num_experts)
        slots = layer.slots if isinstance(layer, PackedLayer) else None
        held = every if slots is None else slots.resident()
        found.append(held if len(held) >= min(EXPERTS_AT_ONCE, len(every)) else every)
    return found


def measure_profile(
    experts: MeasuredExperts, *, name: str, dense_seconds: DenseSeconds
) -> HardwareProfile:
    """Return a profile with measured times of CPU and link, alone and both at once.

    The GPU's times are the CPU's. A real device measures its own times instead; an emulated
    device's speed is an option of the user (`with_emulated_gpu`).
    """
    bench, geometry = _Bench(experts), experts.geometry
    tokens, cpu, first = bench.cpu_tables()
    link = bench.link_seconds()
    cpu_slowdown, link_slowdown = bench.slowdowns()
    expert_bytes = max(layer.image_bytes for layer in experts.store)
    features = detect_cpu()
    shape = ShapeCosts(
        shape=name,
        num_moe_layers=geometry.num_layers,
        num_experts=geometry.num_experts,
        top_k=geometry.top_k,
        expert_bytes=expert_bytes,
        tokens=tokens,
        cpu_seconds=cpu,
        gpu_seconds=cpu,
        dense_seconds=tuple(dense_seconds(count) for count in tokens),
        cpu_first_expert_seconds=first,
        link_seconds_per_expert=link,
    )
    return HardwareProfile(
        name="this machine",
        source="measured by tandem profile; the GPU is emulated",
        cpu=features.model_name,
        gpu=EMULATED,
        cpu_threads=experts.kernels.threads.num_threads,
        gpu_memory_bytes=total_bytes(),
        host_memory_bytes=total_bytes(),
        link_bytes_per_second=expert_bytes / link,
        cpu_slowdown_while_copying=cpu_slowdown,
        link_slowdown_while_computing=link_slowdown,
        shapes=(shape,),
    )


def with_emulated_gpu(profile: HardwareProfile, speed: float) -> HardwareProfile:
    """Return the profile of a machine with a device `speed` times as fast as its CPU."""
    shapes = tuple(
        dataclasses.replace(
            shape,
            gpu_seconds=tuple(seconds / speed for seconds in shape.cpu_seconds),
            dense_seconds=tuple(seconds / speed for seconds in shape.dense_seconds),
        )
        for shape in profile.shapes
    )
    return dataclasses.replace(profile, shapes=shapes)


def with_timed_steps(
    profile: HardwareProfile, prompt_tokens: int, prompt_seconds: float, step_seconds: float
) -> HardwareProfile:
    """Return the profile with dense seconds per layer from timed steps, minus the experts' time.

    `prompt_seconds` is the time of a step of `prompt_tokens` tokens, `step_seconds` of one token.
    """
    shape = profile.shapes[0]

    def rest(tokens: int, seconds: float) -> float:
        return max(0.0, seconds / shape.num_moe_layers - experts_seconds(shape, tokens))

    counts, times = (1, prompt_tokens), (rest(1, step_seconds), rest(prompt_tokens, prompt_seconds))
    dense = tuple(interpolate(counts, times, count) for count in shape.tokens)
    return dataclasses.replace(
        profile, shapes=(dataclasses.replace(shape, dense_seconds=dense), *profile.shapes[1:])
    )


def experts_seconds(shape: ShapeCosts, tokens: int) -> float:
    """Return the CPU's seconds for a layer's experts when `tokens` are spread evenly over them."""
    active = min(shape.num_experts, tokens * shape.top_k)
    each = interpolate(shape.tokens, shape.cpu_seconds, tokens * shape.top_k // active)
    return shape.cpu_first_expert_seconds + active * each


def with_link(profile: HardwareProfile, bytes_per_second: float) -> HardwareProfile:
    """Return the profile of the same machine with a link of `bytes_per_second`.

    The bandwidth that a computing CPU leaves to copies stays the same, so the CPU does not slow
    down a link that needs less.
    """
    left = profile.link_bytes_per_second / profile.link_slowdown_while_computing
    shapes = tuple(
        dataclasses.replace(shape, link_seconds_per_expert=shape.expert_bytes / bytes_per_second)
        for shape in profile.shapes
    )
    return dataclasses.replace(
        profile,
        link_bytes_per_second=bytes_per_second,
        link_slowdown_while_computing=max(1.0, bytes_per_second / left),
        shapes=shapes,
    )


def seconds_each(one: float, many: float, several: int, least: float) -> float:
    """Return the seconds that one more expert adds to a batch.

    A batch of one expert takes `one` seconds, a batch of `several` experts `many`. The result is at
    least half of a batch's seconds per expert, and at least `least`, the result for fewer tokens,
    so that noise never makes the table fall.
    """
    each = (many - one) / (several - 1) if several > 1 else one
    return max(each, many / several / 2, least)


def while_repeating(other: Callable[[], object], work: Callable[[], float]) -> float:
    """Run `work` while another thread repeats `other`; return the result of `work`."""
    stop = threading.Event()

    def keep_on() -> None:
        while not stop.is_set():
            other()

    thread = threading.Thread(target=keep_on, name="tandem-profiler")
    thread.start()
    try:
        return work()
    finally:
        stop.set()
        thread.join()


class _Bench:
    """Times batches and copies; each measurement uses the store's next experts in turn."""

    def __init__(self, experts: MeasuredExperts) -> None:
        self._experts, self._store = experts, experts.store
        self._known = experts_in_memory(self._store)
        self._turns = itertools.cycle(
            [
                (layer, place)
                for layer, known in enumerate(self._known)
                for place in range(len(known))
            ]
        )
        self._rows = RowMemory()

    def _batch_seconds(self, num_experts: int, num_tokens: int) -> float:
        """Return the seconds of one batch of experts with `num_tokens` tokens each."""
        layer, first = next(self._turns)
        for _ in range(num_experts - 1):
            next(self._turns)
        total, known = self._experts.geometry.num_experts, self._known[layer]
        experts = [known[(first + i) % len(known)] for i in range(num_experts)]
        index = torch.tensor([experts] * num_tokens, device="cpu")
        hidden = self._experts.hidden(num_tokens)
        routing = Routing(index, total)
        order = routing.fastest_order()
        side = CallSide(hidden, self._rows(routing.num_routed, self._experts.hidden_size))
        batch = LayerCall(self._store[layer], self._experts.functions, routing, order).batch(
            0, len(order), side
        )
        begin = time.perf_counter()
        self._experts.kernels.run(batch)
        return time.perf_counter() - begin

    def _median_batch(self, num_experts: int, num_tokens: int) -> float:
        self._batch_seconds(num_experts, num_tokens)  # memory and threads warm up
        return median(self._batch_seconds(num_experts, num_tokens) for _ in range(REPETITIONS))

    def cpu_tables(self) -> tuple[tuple[int, ...], tuple[float, ...], float]:
        """Return token counts, seconds per further expert by count, extra seconds of the first."""
        several = self._experts.num_at_once
        tokens: list[int] = []
        seconds: list[float] = []
        first = 0.0
        for count in TOKEN_COUNTS:
            one, many = self._median_batch(1, count), self._median_batch(several, count)
            each = seconds_each(one, many, several, seconds[-1] if seconds else 0.0)
            if count == 1:
                first = max(0.0, one - each)
            tokens.append(count)
            seconds.append(each)
            if many > LONGEST_BATCH_SECONDS:
                break
        return tuple(tokens), tuple(seconds), first

    def link_seconds(self) -> float:
        """Return the seconds of copying one expert to other memory."""
        memory = self._slot()
        return median(self._copy_seconds(memory) for _ in range(4 * REPETITIONS))

    def slowdowns(self) -> tuple[float, float]:
        """Return how much CPU and link slow each other down: factors of at least 1."""
        several = self._experts.num_at_once
        alone, copy_alone = self._median_batch(several, 1), self.link_seconds()
        memory, copies = self._slot(), list[float]()
        both = while_repeating(
            lambda: copies.append(self._copy_seconds(memory)),
            lambda: self._median_batch(several, 1),
        )
        return max(1.0, both / alone), max(1.0, median(copies or [copy_alone]) / copy_alone)

    def _slot(self) -> torch.Tensor:
        return torch.zeros(
            max(layer.image_bytes for layer in self._store), dtype=torch.uint8, device="cpu"
        )

    def _copy_seconds(self, memory: torch.Tensor) -> float:
        layer, place = next(self._turns)
        begin = time.perf_counter()
        copy_image(self._store, layer, self._known[layer][place], memory)
        return time.perf_counter() - begin
