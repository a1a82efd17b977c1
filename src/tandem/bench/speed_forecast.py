"""How fast a model will be on this machine: measured on a few of its layers with random weights.

A layer costs the same whatever its weights are, so two models of few layers are timed and the time
of the others follows: first + (layers - few) * difference. Small models are built whole. What was
measured is kept by processor, shape and format.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from tandem.bench.generation import Workload, measure
from tandem.bench.model_shapes import ModelShape
from tandem.bench.random_model import build_random_model
from tandem.generate.generator import Generator
from tandem.hf.config import OffloadConfig
from tandem.hf.sizes import ModelSizes
from tandem.kernels.cpu import detect_cpu
from tandem.kernels.dense import CpuThreads
from tandem.offload.host_memory import available_bytes

# Raise it when what is measured changes: older forecasts are then made anew.
MEASUREMENT = 1
PROMPT_TOKENS = 256
DECODE_STEPS = 24
_FEW_LAYERS, _MORE_LAYERS = 2, 6
_WHOLE_BYTES = 2 << 30  # models up to this are built whole
_SHARE_OF_MEMORY = 0.5  # of what is free, for the layers that are built


@dataclasses.dataclass(frozen=True, slots=True)
class SpeedForecast:
    """Seconds of a prompt and of a decode step, and how many layers they were measured on."""

    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float
    measured_layers: int

    @property
    def prefill_tokens_per_second(self) -> float:
        """Tokens of the prompt per second."""
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens written per second."""
        return 1.0 / self.decode_seconds


def forecast_speed(
    sizes: ModelSizes, offload: OffloadConfig, *, cache_dir: Path, refresh: bool = False
) -> SpeedForecast | str:
    """Return the speed on the CPU, kept or measured; a reason in words where it cannot be told."""
    reason = _why_not(sizes)
    if reason:
        return reason
    path = cache_dir / "forecasts" / f"{sizes.config.model_type}-{_key(sizes, offload)}.json"
    if path.is_file() and not refresh:
        try:
            return SpeedForecast(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            pass  # damaged: measured anew
    forecast = _measure(sizes, offload)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dataclasses.asdict(forecast)), encoding="utf-8")
    return forecast


def extrapolate(few: tuple[int, float], more: tuple[int, float], layers: int) -> float:
    """Return the seconds of `layers` layers from (layers, seconds) of two smaller models."""
    (few_layers, few_seconds), (more_layers, more_seconds) = few, more
    if more_layers == few_layers:
        return more_seconds
    each = max(0.0, more_seconds - few_seconds) / (more_layers - few_layers)
    return more_seconds + (layers - more_layers) * each


def _why_not(sizes: ModelSizes) -> str:
    if len(sizes.expert_formats) > 1:
        return "its layers are in several formats"
    if sizes.expert_formats[0] == "float32":
        return "experts in fp32 run on the torch reference, which is for tests"
    layer_bytes = sizes.experts_bytes / sizes.num_moe_layers
    if (_FEW_LAYERS + 1) * layer_bytes > _SHARE_OF_MEMORY * available_bytes():
        return "the memory that is free does not hold three of its layers"
    return ""


def _measure(sizes: ModelSizes, offload: OffloadConfig) -> SpeedForecast:
    dense_layers = sizes.num_layers - sizes.num_moe_layers
    counts = [sizes.num_layers]
    if sizes.experts_bytes > _WHOLE_BYTES:
        layer_bytes = sizes.experts_bytes / sizes.num_moe_layers
        room = int(_SHARE_OF_MEMORY * available_bytes() / layer_bytes)
        more = min(_MORE_LAYERS, room, sizes.num_moe_layers)
        counts = [dense_layers + min(_FEW_LAYERS, more - 1), dense_layers + more]
    times = [(count, *_time(sizes, offload, count)) for count in counts]
    few, more_times = times[0], times[-1]
    return SpeedForecast(
        PROMPT_TOKENS,
        extrapolate((few[0], few[1]), (more_times[0], more_times[1]), sizes.num_layers),
        extrapolate((few[0], few[2]), (more_times[0], more_times[2]), sizes.num_layers),
        counts[-1],
    )


def _time(sizes: ModelSizes, offload: OffloadConfig, num_layers: int) -> tuple[float, float]:
    """Return the seconds of a prompt and of a decode step with so many layers."""
    options = OffloadConfig(
        expert_dtype=sizes.expert_formats[0], threads=offload.threads, isa=offload.isa
    )
    threads = CpuThreads(
        num_threads=offload.threads or detect_cpu().physical_cores, isa=offload.isa or ""
    )
    shape = ModelShape(str(sizes.config.model_type), _cut(sizes.config.to_dict(), num_layers))
    model = build_random_model(shape, options, threads, dense_dtype=offload.dense_dtype)
    generator = Generator(model)
    work = Workload(prompt_tokens=PROMPT_TOKENS, new_tokens=DECODE_STEPS)
    measured = measure(model, generator, work)
    model.hf_quantizer.executor.close()
    return measured.time_to_first_token_seconds, 1 / measured.speed.decode_tokens_per_second


def _cut(values: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Return a config's values with its first layers only."""
    dropped = ("model_type", "architectures", "dtype", "torch_dtype", "transformers_version")
    kept = {k: v for k, v in values.items() if k not in dropped and not k.startswith("_")}
    total = int(kept.get("num_hidden_layers", num_layers))
    kept["num_hidden_layers"] = num_layers
    kept["tie_word_embeddings"] = False  # the head is packed, and reads the same bytes
    for key, value in kept.items():
        if isinstance(value, list) and len(value) == total and total > num_layers:
            kept[key] = value[:num_layers]
    return kept


def _key(sizes: ModelSizes, offload: OffloadConfig) -> str:
    cpu = detect_cpu()
    config = json.dumps(_cut(sizes.config.to_dict(), sizes.num_layers), sort_keys=True, default=str)
    parts = (
        MEASUREMENT, cpu.model_name, cpu.instruction_sets, offload.threads or cpu.physical_cores,
        offload.isa, sizes.expert_formats, offload.dense_dtype, config,
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
