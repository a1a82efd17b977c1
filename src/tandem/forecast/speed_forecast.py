"""Forecasts a model's speed on this machine, measured on a few layers with random weights.

A layer's time does not depend on its weights. So a model with few and a model with more layers are
timed, and the whole follows: seconds(more) + (layers - more) * (seconds(more) - seconds(few)) /
(more - few). The two models are timed in alternation, and the median of the rounds counts, because
a forecast is for usual conditions, not for the machine's best. Small models are built whole.
Measurements are stored by processor, threads, shape and format.
"""

import dataclasses
import hashlib
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tandem.bench.generation import WARM_UP_STEPS, Workload, measure
from tandem.bench.model_shapes import ModelShape
from tandem.bench.random_model import build_random_model
from tandem.experts.store.host_memory import available_bytes
from tandem.forecast.sizes import ModelSizes
from tandem.foreign_types import PreTrainedModel
from tandem.generate.generator import Generator
from tandem.hardware.profiles import keep_file
from tandem.hf.config import OffloadConfig
from tandem.hf.runtime import require_runtime
from tandem.kernels.cpu import detect_cpu

# Increase it when the measurement changes: older forecasts are then measured again.
MEASUREMENT = 7
PROMPT_TOKENS = 256
DECODE_STEPS = 24
FIRST_TOKENS = WARM_UP_STEPS
_FEW_LAYERS = 2
# How many more layers the larger model has. An error of timing is multiplied by (layers - more) /
# (more - few), so fewer layers would be too inaccurate.
_LEAST_MORE, _MOST_MORE = 7, 10
_WHOLE_BYTES = 2 << 30  # models up to this size are built completely
_SHARE_OF_MEMORY = 0.5  # share of the free memory for the layers that are built
ROUNDS = 7


@dataclasses.dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds of a prompt and of a decode step."""

    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def prefill_tokens_per_second(self) -> float:
        """Tokens of the prompt per second."""
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Generated tokens per second."""
        return 1.0 / self.decode_seconds


@dataclasses.dataclass(frozen=True, slots=True)
class SpeedForecast(Forecast):
    """The forecast for the CPU, and how many layers it was measured on.

    "First" means right after loading: nothing is warmed up, and decode steps are still recorded.
    """

    measured_layers: int
    first_prefill_seconds: float
    first_tokens_seconds: float
    """Total time of the first `FIRST_TOKENS` decode steps."""

    @property
    def first_tokens_per_second(self) -> float:
        """Generated tokens per second, over the first `FIRST_TOKENS`."""
        return FIRST_TOKENS / self.first_tokens_seconds


def forecast_speed(
    sizes: ModelSizes,
    offload: OffloadConfig,
    *,
    cache_dir: Path,
    refresh: bool = False,
    rounds: int = ROUNDS,
) -> SpeedForecast | str:
    """Return the speed on this CPU, or why it cannot be measured.

    A forecast stored in `cache_dir` is returned unless `refresh` is set; otherwise the layers are
    timed in `rounds` rounds.
    """
    reason = why_not_measured(sizes)
    if reason:
        return reason
    path = cache_dir / "forecasts" / f"{sizes.config.model_type}-{_key(sizes, offload)}.json"
    if path.is_file() and not refresh:
        try:
            return SpeedForecast(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            pass  # damaged: measured again
    forecast = _measure(sizes, offload, rounds)
    keep_file(path, json.dumps(dataclasses.asdict(forecast)))
    return forecast


def extrapolate(few: tuple[int, float], more: tuple[int, float], layers: int) -> float:
    """Return the seconds of `layers` layers from (layers, seconds) of two smaller models."""
    (few_layers, few_seconds), (more_layers, more_seconds) = few, more
    if more_layers == few_layers:
        return more_seconds
    each = max(0.0, more_seconds - few_seconds) / (more_layers - few_layers)
    return more_seconds + (layers - more_layers) * each


def why_not_measured(sizes: ModelSizes) -> str:
    """Return why this model's layers cannot be timed here; empty if they can."""
    if len(sizes.expert_formats) > 1:
        return "its layers are in several formats"
    if sizes.has_plain_experts:
        return "experts in fp32 run on the torch reference, which is for tests"
    if sizes.dense_format == "none" and sizes.config.dtype is torch.float32:
        return "its linear layers are in fp32, and layers are timed in bf16"
    if (2 * _FEW_LAYERS + 1) * sizes.layer_bytes > _SHARE_OF_MEMORY * available_bytes():
        return "the memory that is free does not hold a few of its layers"
    return ""


class Times(NamedTuple):
    """The measured times of one model; names as in `SpeedForecast`."""

    prefill_seconds: float
    decode_seconds: float
    first_prefill_seconds: float
    first_tokens_seconds: float


def _measure(sizes: ModelSizes, offload: OffloadConfig, num_rounds: int) -> SpeedForecast:
    counts = _layers_to_time(sizes)
    models = [_build(sizes, offload, count) for count in counts]
    rounds = [[time_model(model) for model in models] for _ in range(num_rounds)]
    for model in models:
        require_runtime(model).executor.close()
    usual = _median([_extrapolate(counts, times, sizes.num_layers) for times in rounds])
    # One-time costs of a process fall on its first prompt and first steps, which the smallest model
    # ran.
    few = [times[0] for times in rounds]
    once = [max(0.0, first - median) for first, median in zip(few[0], _median(few), strict=True)]
    first_prefill, first_tokens = Times(*once)[2:]
    return SpeedForecast(
        PROMPT_TOKENS, usual.prefill_seconds, usual.decode_seconds, counts[-1],
        usual.first_prefill_seconds + first_prefill, usual.first_tokens_seconds + first_tokens,
    )  # fmt: skip


def _extrapolate(counts: Sequence[int], times: Sequence[Times], num_layers: int) -> Times:
    """Return the times of the whole model, given the times of models with `counts` layers."""
    ends = zip(times[0], times[-1], strict=True)
    return Times(*(extrapolate((counts[0], a), (counts[-1], b), num_layers) for a, b in ends))


def _median(times: Sequence[Times]) -> Times:
    return Times(*(statistics.median(values) for values in zip(*times, strict=True)))


def _layers_to_time(sizes: ModelSizes) -> list[int]:
    """Return the layer counts of the models to time: two, or the full count of a small model."""
    if sizes.layers_bytes <= _WHOLE_BYTES:
        return [sizes.num_layers]
    listed = cut_shape(sizes, sizes.num_layers).kinds
    large = range(len(listed)) if sizes.is_dense else sizes.moe_layers
    kinds = [(layer in large, kind) for layer, kind in enumerate(map(repr, listed))]
    return prefixes_to_time(kinds, int(_SHARE_OF_MEMORY * available_bytes() / sizes.layer_bytes))


def prefixes_to_time(kinds: Sequence[tuple[bool, str]], room: int) -> list[int]:
    """Return the lengths of two prefixes of a model's layers that represent its other layers.

    `kinds` describes two or more layers: whether each holds experts (true for all layers of a dense
    model), and its other properties. The first prefix is the shortest that contains each kind which
    more than one layer has. The additional layers of the second prefix have the mix of kinds most
    like that of all layers after the first prefix. Together the prefixes have at most `room` layers
    with experts, if two such prefixes exist.
    """
    lengths = range(1, len(kinds) + 1)
    num_moe = [sum(has_experts for has_experts, _ in kinds[:n]) for n in range(len(kinds) + 1)]
    repeated = {kind for kind, count in Counter(kinds).items() if count > 1}
    complete = next(n for n in lengths if repeated <= set(kinds[:n]))
    smallest = next(n for n in lengths if num_moe[n])
    few = min(max(complete, _FEW_LAYERS), len(kinds) - 1)
    while few > smallest and num_moe[few] + num_moe[few + 1] > room:
        few -= 1
    ends = [n for n in lengths if few < n <= few + _MOST_MORE and num_moe[few] + num_moe[n] <= room]
    enough = [n for n in ends if n >= few + _LEAST_MORE] or ends[-1:] or [few + 1]
    rest = Counter(kinds[few:])
    return [few, min(enough, key=lambda n: (_difference(Counter(kinds[few:n]), rest), -n))]


def _difference(some: Counter[tuple[bool, str]], others: Counter[tuple[bool, str]]) -> float:
    """Return the sum of the differences between the kinds' shares in two groups of layers."""
    shares = (some[kind] / some.total() - n / others.total() for kind, n in others.items())
    return round(sum(map(abs, shares)), 6)


def _build(sizes: ModelSizes, offload: OffloadConfig, num_layers: int) -> PreTrainedModel:
    """Return a model of `num_layers` layers with random weights."""
    (expert_dtype,) = sizes.expert_formats or ("auto",)
    options = OffloadConfig(expert_dtype=expert_dtype, threads=offload.threads, isa=offload.isa)
    shape = cut_shape(sizes, num_layers)
    return build_random_model(
        shape, options, dense_dtype=sizes.dense_format,
        has_huge_pages=not sizes.are_experts_mapped,
    )  # fmt: skip


def time_model(model: PreTrainedModel) -> Times:
    """Return the times of a prompt and of decode steps."""
    work = Workload(prompt_tokens=PROMPT_TOKENS, new_tokens=DECODE_STEPS)
    measured = measure(model, Generator(model), work)
    return Times(
        measured.time_to_first_token_seconds,
        1 / measured.speed.decode_tokens_per_second,
        measured.first_prefill_seconds,
        measured.warm_up_seconds,
    )


def cut_shape(sizes: ModelSizes, num_layers: int) -> ModelShape:
    """Return a model's shape with its first `num_layers` layers only."""
    dropped = ("model_type", "architectures", "dtype", "torch_dtype", "transformers_version")
    values = {
        key: value
        for key, value in sizes.config.to_dict().items()
        if key not in dropped and not key.startswith("_")
    }
    whole = {"num_hidden_layers": sizes.num_layers} | values
    return ModelShape(str(sizes.config.model_type), whole).cut(num_layers)


def _key(sizes: ModelSizes, offload: OffloadConfig) -> str:
    cpu = detect_cpu()
    shape = cut_shape(sizes, sizes.num_layers)
    config = json.dumps(shape.values, sort_keys=True, default=str)
    parts = (
        MEASUREMENT, cpu.model_name, cpu.instruction_sets, offload.num_threads,
        offload.isa, sizes.expert_formats, sizes.are_experts_mapped, sizes.dense_format,
        config,
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
