"""Compares forecasts with measurements: how far `tandem plan` is off on this machine."""

import gc
import math
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tandem.bench.generation import Workload, measure
from tandem.bench.model_shapes import MODEL_SHAPES, ModelShape
from tandem.bench.random_model import build_random_model
from tandem.core.errors import ExecutionError
from tandem.experts.execution.forced_routing import ForcedRouting
from tandem.experts.measuring.profiler import with_timed_steps
from tandem.experts.store.host_memory import available_bytes
from tandem.forecast.gpu_forecast import GpuRun, geometry_of, shape_sizes
from tandem.forecast.report.stages import NotHereError, Stage, StageResult
from tandem.forecast.speed_forecast import PROMPT_TOKENS, ROUNDS, forecast_speed
from tandem.generate.generator import Generator
from tandem.hf.assembly import profile_of
from tandem.hf.config import OffloadConfig
from tandem.hf.runtime import require_runtime
from tandem.policy.cost import HardwareProfile
from tandem.policy.step_path import run_path
from tandem.sim.typical_routing import typical_routing

_DECODE_STEPS = 64
_MOST_LAYERS = 16
_LEAST_LAYERS = 4
_SHARE_OF_MEMORY = 0.35  # share of the free memory for the measured experts
_GPU_SHAPE, _GPU_LAYERS = "qwen3-30b-a3b", 8
_VOCABULARY = 32_768
_LIMIT_SECONDS = 600.0


class Speeds(NamedTuple):
    """Tokens per second of a prompt and of the tokens after it."""

    prompt: float
    decode: float


def compare(
    what: str, forecast: Speeds, measured: Speeds, profile: HardwareProfile | None = None
) -> StageResult:
    """Return a result with a forecast beside its measurement, as text and as numbers."""
    parts = [
        f"{name} {found:.1f} tok/s, forecast {predicted:.1f} ({predicted / found - 1:+.0%})"
        for name, predicted, found in zip(("prompt", "decode"), forecast, measured, strict=True)
    ]
    numbers = {f"forecast_{name}": value for name, value in forecast._asdict().items()}
    numbers |= {f"measured_{name}": value for name, value in measured._asdict().items()}
    return StageResult(f"{what}: {', '.join(parts)}", numbers, profile)


_SHORTEST_SECONDS = 0.1  # system counters have a resolution of 0.01 s


class OtherPrograms:
    """Measures the processor time that other programs use; much of it makes forecasts wrong."""

    def __init__(self) -> None:
        """Start measuring."""
        self._seconds, self._since = _seconds_of_others(), time.perf_counter()

    @property
    def cores(self) -> float:
        """The average number of cores that other programs use; 0 if the system does not tell."""
        seconds = _seconds_of_others() - self._seconds
        return max(0.0, seconds) / max(_SHORTEST_SECONDS, time.perf_counter() - self._since)


def _seconds_of_others() -> float:
    """Return the processor seconds of all other programs since the start of the system.

    Returns 0 if the system is not Linux.
    """
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:  # not Linux
        return 0.0
    ticks = [int(field) for field in fields]
    # Without idle and iowait; includes the time that the host takes from a guest.
    busy = sum(ticks[:3]) + sum(ticks[5:8])
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time()


def on_cpu(shape: ModelShape, expert_dtype: str, *, rounds: int = ROUNDS) -> StageResult:
    """Forecast a model's speed from a few layers, then measure all layers that fit in memory.

    The weights are random. The layers of the forecast are timed in `rounds` rounds.
    """
    others = OtherPrograms()
    with TemporaryDirectory() as folder:
        offload = OffloadConfig(expert_dtype=expert_dtype, dense_dtype="auto", cache_dir=folder)
        shape = _cut_to_memory(shape, offload)
        num_layers = shape.values["num_hidden_layers"]
        sizes = shape_sizes(shape, offload)
        forecast = forecast_speed(sizes, offload, cache_dir=Path(folder), rounds=rounds)
        if isinstance(forecast, str):
            raise NotHereError(forecast)
        gc.collect()  # frees the forecast's models
        model = build_random_model(shape, offload, dense_dtype=sizes.dense_format)
        profile = profile_of(model)
        measured = _measured(model)
        require_runtime(model).executor.close()
    times = PROMPT_TOKENS / measured.prompt, 1 / measured.decode
    predicted = Speeds(forecast.prefill_tokens_per_second, forecast.decode_tokens_per_second)
    found = compare(
        f"{num_layers} layers, forecast from {forecast.measured_layers}", predicted, measured,
        with_timed_steps(profile, PROMPT_TOKENS, *times),
    )  # fmt: skip
    text = f"{found.text}; other programs took {(cores := others.cores):.1f} cores meanwhile"
    return replace(found, text=text, numbers={**found.numbers, "others_cores": cores})


def _cut_to_memory(shape: ModelShape, offload: OffloadConfig) -> ModelShape:
    """Return `shape` cut to the layers that fit in free memory, at most `_MOST_LAYERS`.

    Raises `NotHereError` if fewer than `_LEAST_LAYERS` fit.
    """
    whole = shape_sizes(shape, offload)
    layer_bytes = whole.experts_bytes / whole.num_moe_layers
    room = int(_SHARE_OF_MEMORY * available_bytes() / layer_bytes)
    num_layers = min(whole.num_layers, _MOST_LAYERS, room)
    if num_layers < _LEAST_LAYERS:
        raise NotHereError("the memory that is free does not hold a few of its layers")
    return shape.cut(num_layers)


def on_gpu(shape: ModelShape, share: float, device: str = "cuda") -> StageResult:
    """Simulate layers with a share of their experts on the GPU, then measure the same layers."""
    with TemporaryDirectory() as folder:
        offload = OffloadConfig(expert_dtype="int4", device=device, cache_dir=folder)
        place = "cpu" if device == "emulated" else device
        model = build_random_model(shape, offload, dense_dtype="none", device=place)
        runtime = require_runtime(model)
        cache, executor = runtime.executor.cache, runtime.executor
        if cache is None:
            raise ExecutionError(f"a model that was built for {device} has no expert cache")
        sizes = shape_sizes(shape, offload)
        num_slots = max(1, math.floor(share * sizes.num_experts))
        settings, profile = offload.planner_settings(), cache.machine.profile
        path = run_path(profile, offload.why_planned())
        forecast = GpuRun(sizes, profile, settings, num_slots, path).forecast()
        is_whole = num_slots == sizes.num_experts
        cache.resize(settings.slots_for(num_slots) if is_whole else num_slots)
        routing = typical_routing(
            geometry_of(sizes), num_sequences=1, num_tokens=PROMPT_TOKENS + _DECODE_STEPS
        )
        runtime.use(ForcedRouting(executor, routing))
        measured = _measured(model)
        executor.close()
    predicted = Speeds(forecast.prefill_tokens_per_second, forecast.decode_tokens_per_second)
    return compare(f"{share:.0%} of the experts on the GPU", predicted, measured, profile)


def _measured(model: object) -> Speeds:
    work = Workload(prompt_tokens=PROMPT_TOKENS, new_tokens=_DECODE_STEPS)
    speed = measure(model, Generator(model), work).speed
    return Speeds(speed.prefill_tokens_per_second, speed.decode_tokens_per_second)


def _shape(name: str) -> ModelShape:
    """Return a released model's shape, with a smaller vocabulary to save memory."""
    shape = MODEL_SHAPES[name]
    return replace(shape, values=shape.values | {"vocab_size": _VOCABULARY})


CPU_SPEED_STAGES = tuple(
    Stage(f"{name} {expert_dtype}", partial(on_cpu, _shape(name), expert_dtype), _LIMIT_SECONDS)
    for name, expert_dtype in (
        ("qwen3-30b-a3b", "int4"),
        ("gpt-oss-20b", "mxfp4"),
        ("olmoe", "int8"),
    )
)
GPU_SPEED_STAGES = tuple(
    Stage(
        f"{_GPU_SHAPE} int4 {share:.0%}",
        partial(on_gpu, _shape(_GPU_SHAPE).cut(_GPU_LAYERS), share),
        _LIMIT_SECONDS,
    )
    for share in (0.25, 0.5, 1.0)
)
# The stages of a datapoint: one, within a minute.
CPU_DATAPOINT_STAGES = (
    Stage(
        "olmoe int4",
        partial(on_cpu, _shape("olmoe"), "int4", rounds=1),
        _LIMIT_SECONDS,
    ),
)
GPU_DATAPOINT_STAGES = GPU_SPEED_STAGES[1:2]
