"""Times a whole model: time to first token, prefill and decode, against this machine's ceilings.

A decode step cannot be faster than the reads of its bytes; a prefill cannot be faster than its
multiplications. Both ceilings follow from the best rates of the same threads on this machine.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import torch
from torch import nn

from tandem.bench.kernels import Ceiling, KernelBench
from tandem.checkpoint.config_values import experts_per_token
from tandem.decode.cpu_slots import CpuSlotPool
from tandem.decode.slots import CachedSlotPool, SlotPool
from tandem.experts.store.packed_layer import PackedLayer
from tandem.experts.tracing.events import ExpertStatistics, LayerExecuted
from tandem.foreign_types import PreTrainedModel
from tandem.generate.generator import Generator
from tandem.generate.sampler import Sampler
from tandem.generate.sampling import SamplingRule
from tandem.hf.dense import is_tower
from tandem.hf.experts import is_experts_module
from tandem.hf.packed_layers import PackedLinear
from tandem.hf.runtime import require_runtime
from tandem.kernels.formats.weight_format import WeightFormat
from tandem.recording.recorded_graph import RecordedGraph
from tandem.recording.recorder import Operation
from tandem.recording.replay import StepRecording

_CEILING_SAMPLES = 5
WARM_UP_STEPS = 6  # steps in which the recording is made and compared
_PROFILE_RUNS = 10
_READ_EVERY = 4  # steps; the step after a reading runs with cold CPU caches
_ROUTER_WORK = {"softmax", "_softmax", "topk", "sum", "div", "div_", "gather", "sigmoid", "sort"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The size of the measured run: prompt, decode steps and batch."""

    prompt_tokens: int
    new_tokens: int
    batch: int = 1
    depth: int = 0
    """Tokens in the KV cache before the prompt."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of the whole batch: a measurement or a ceiling."""

    prefill_tokens_per_second: float
    decode_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The times of one run, and how a decode step's milliseconds were spent."""

    time_to_first_token_seconds: float
    speed: Speed
    step_bytes: int
    """Bytes that a decode step touches: dense weights, distinct experts, KV cache, states
    (twice)."""
    milliseconds: dict[str, float]
    first_prefill_seconds: float
    """Time to compute the first prompt without a warm-up, as a user's first prompt is computed."""
    warm_up_seconds: float
    """Total time of the first `WARM_UP_STEPS` decode steps."""
    read_gigabytes_per_second: float
    """Memory bandwidth between decode steps; 0 if not measured."""
    decode_share: float
    """The time to read a step's bytes, at the read rate right after the step, as a share of the
    step's time; 0 if not measured."""


def measure_machine(bench: KernelBench) -> Ceiling:
    """Return the median of each of the machine's ceilings over several measurements."""
    samples = [asdict(bench.ceiling()) for _ in range(_CEILING_SAMPLES)]
    return Ceiling(**{n: statistics.median(s[n] for s in samples) for n in samples[0]})


def ceiling_of(model: PreTrainedModel, work: Workload, machine: Ceiling, step_bytes: int) -> Speed:
    """Return the highest speeds that `machine` permits if a decode step reads `step_bytes`."""
    seconds = step_bytes / (machine.read_gigabytes_per_second * 1e9)
    prefill = 0.0
    for num_weights, fmt in _weights_per_token(model):
        prefill += 2 * num_weights / (machine.peak_of(fmt) * 1e9)
    return Speed(1 / prefill, work.batch / seconds)


def measure(
    model: PreTrainedModel, generator: Generator, work: Workload, bench: KernelBench | None = None
) -> Measured:
    """Time prefill and greedy decoding of random tokens, after a warm-up.

    `bench`, if given, measures the read rate between decode steps, because the rate changes on
    shared machines.
    """
    prompts = dict(enumerate(_random_prompts(model, work)))
    pool = generator.slot_pool(work.batch, capacity=work.prompt_tokens + work.new_tokens)
    start = time.perf_counter()
    pool.prefill(prompts)  # once, so that the memory for a prompt's activations is allocated
    first_prefill = time.perf_counter() - start
    if isinstance(pool, CachedSlotPool):
        pool.pretend(work.depth, work.prompt_tokens + work.new_tokens)
    sampler = Sampler(SamplingRule(), work.batch, None)
    start = time.perf_counter()
    tokens = sampler.choose(pool.prefill(prompts), ())
    first = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(WARM_UP_STEPS):
        tokens = sampler.choose(pool.decode(dict(enumerate(tokens))), ())
    warm_up = time.perf_counter() - start
    decoded = _decode(model, pool, sampler, max(1, work.new_tokens), tokens, bench)
    step = statistics.median(decoded.steps)
    step_bytes = decoded.expert_bytes + dense_bytes(model) + _cache_bytes(pool)
    recording = None if pool.step is None else pool.step.recording
    return Measured(
        time_to_first_token_seconds=first,
        speed=Speed(work.batch * work.prompt_tokens / first, work.batch / step),
        step_bytes=step_bytes,
        milliseconds=_milliseconds(
            model, recording, step, statistics.median(decoded.sampling), decoded.plan_seconds
        ),
        first_prefill_seconds=first_prefill,
        warm_up_seconds=warm_up,
        read_gigabytes_per_second=statistics.median([rate for _, rate in decoded.reads] or [0.0]),
        decode_share=statistics.median(
            [step_bytes / 1e9 / rate / seconds for seconds, rate in decoded.reads] or [0.0]
        ),
    )


@dataclass(slots=True)
class _Decoded:
    """The seconds of each decode step, and means over the steps."""

    steps: list[float] = field(default_factory=list)
    sampling: list[float] = field(default_factory=list)
    """Seconds of each step spent on sampling."""
    reads: list[tuple[float, float]] = field(default_factory=list)
    """(seconds of a step, memory bandwidth in GB/s right after the step), for some steps."""
    expert_bytes: int = 0
    """Mean bytes of experts that a step touches."""
    plan_seconds: float = 0.0
    """Mean planning time of a step."""


def _decode(
    model: PreTrainedModel, pool: SlotPool, sampler: Sampler, num_steps: int, tokens: list[int],
    bench: KernelBench | None,
) -> _Decoded:  # fmt: skip
    decoded, experts, plans = _Decoded(), ExpertStatistics(), _PlanTime()
    executor = require_runtime(model).executor
    executor.catch_up()
    executor.listeners += [experts, plans]
    for number in range(num_steps):
        start = time.perf_counter()
        logits = pool.decode(dict(enumerate(tokens)))
        between = time.perf_counter()
        tokens = sampler.choose(logits, ())
        end = time.perf_counter()
        decoded.sampling.append(end - between)
        decoded.steps.append(end - start)
        if bench is not None and number % _READ_EVERY == min(num_steps, _READ_EVERY) - 1:
            decoded.reads.append((end - start, bench.read_rate()))
    executor.catch_up()
    for listener in (experts, plans):
        executor.listeners.remove(listener)
    decoded.expert_bytes = experts.touched_bytes // num_steps
    decoded.plan_seconds = plans.seconds / num_steps
    return decoded


class _PlanTime:
    """Sums up the planning time of the layers that are executed."""

    seconds = 0.0

    def __call__(self, event: LayerExecuted) -> None:
        self.seconds += event.plan_seconds


def _milliseconds(
    model: PreTrainedModel,
    recorded: StepRecording | None,
    step: float,
    sampling: float,
    plan: float,
) -> dict[str, float]:
    """Return a step's milliseconds by part, from profiled runs; the remaining time is "other".

    Without a recorded graph, only planning and sampling are known.
    """
    parts = dict.fromkeys(("router", "plan", "experts", "dense", "attention", "sampling"), 0.0)
    parts |= {"sampling": sampling * 1e3, "plan": plan * 1e3}
    if isinstance(recorded, RecordedGraph):
        num_experts = {layer.arrivals.num_experts for layer in require_runtime(model).store}
        for operation, seconds in recorded.profile(_PROFILE_RUNS):
            part = _part(operation, recorded, num_experts)
            if part is not None:
                parts[part] += seconds * 1e3
        parts["experts"] -= parts["plan"]
    return {**parts, "other": max(0.0, step * 1e3 - sum(parts.values()))}


def _part(operation: Operation, recorded: RecordedGraph, num_experts: set[int]) -> str | None:
    if operation.name == "experts":
        return "experts"
    if operation.name in ("attend", "attention"):
        return "attention"
    if operation.name in ("dense", "linear", "matmul", "mm"):
        output = operation.outputs[0]
        is_router = output is not None and recorded.shape_of(output)[-1] in num_experts
        return "router" if is_router else "dense"
    return "router" if operation.name in _ROUTER_WORK else None


def _text_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that every text token uses: no experts, embeddings or towers."""
    for path, module in model.named_modules():
        if not (is_tower(path) or is_experts_module(module) or isinstance(module, nn.Embedding)):
            yield module


def dense_bytes(model: nn.Module) -> int:
    """Return the bytes of the weights that every step reads whole: no experts or embeddings."""
    return sum(
        module.packed.num_bytes
        if isinstance(module, PackedLinear)
        else sum(weight.nbytes for weight in module.parameters(recurse=False))
        for module in _text_modules(model)
    )


def _cache_bytes(pool: SlotPool) -> int:
    """Return the bytes per step of all slots: keys and values read, states read and written.

    0 if the slots are not `CpuSlotPool`'s.
    """
    if not isinstance(pool, CpuSlotPool):
        return 0
    return pool.cache.filled_bytes + 2 * pool.num_slots * pool.cache.states.step_bytes


def _weights_per_token(model: PreTrainedModel) -> Iterator[tuple[int, WeightFormat | None]]:
    """Yield (number of weights, packed format or None) of the matrices that a prompt's token uses.

    The head is left out, and experts count as often as a token uses them.
    """
    head = model.get_output_embeddings()
    for module in _text_modules(model):
        if isinstance(module, nn.Linear | PackedLinear) and module is not head:
            num = module.in_features * module.out_features
            yield num, module.packed.matrix.format if isinstance(module, PackedLinear) else None
    top_k = experts_per_token(model.config.get_text_config())
    for layer in require_runtime(model).store:
        if isinstance(layer, PackedLayer):
            layout = layer.layout
            num = (layout.num_halves + 1) * layout.hidden_size * layout.intermediate_size
            yield top_k * num, layout.format


def _random_prompts(model: PreTrainedModel, work: Workload) -> list[list[int]]:
    random = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    size = (work.batch, work.prompt_tokens)
    prompts: list[list[int]] = torch.randint(
        vocabulary, size, generator=random, device="cpu"
    ).tolist()
    return prompts
