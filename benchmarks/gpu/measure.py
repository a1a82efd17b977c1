"""One cell: prefill, time to first token, decode, and where the time goes."""

import time
from typing import Any, NamedTuple

import torch
from benchmarks.gpu.prediction import Prediction

from tandem.core.errors import TandemError
from tandem.decode.cuda.slots import CudaSlotPool, new_cuda_slot_pool
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.experts.tracing.cache_statistics import CacheStatistics

# Steps before the clock runs: the segments are captured and compared, and the cache settles.
WARM_STEPS = 12
PROFILED_STEPS = 4
WARM_PROMPTS = (
    8  # the first compile kernels and fill the cache, later ones are captured and compared
)


class Result(NamedTuple):
    """The measurements; seconds of the GPU, the link and the CPU are per decode step."""

    prefill_tokens_per_second: float
    time_to_first_token_seconds: float
    decode_tokens_per_second: float
    hit_rate: float
    device_share: float
    link_gigabytes_per_second: float
    is_replaying: bool
    why_not: str | None
    slots: int
    plan_microseconds: float
    """Host time to plan a layer, part of its budget of 100 us."""
    predicted_tokens_per_second: float | None
    """Decode speed from the simulator with the measured profile; None if it could not follow."""
    lanes: dict[str, float]


class Work(NamedTuple):
    """The workload."""

    prompt_tokens: int
    new_tokens: int
    batch: int


def measure(model: Any, executor: HybridExecutor, work: Work) -> Result:
    """Run prompts and steps on an executor whose cache has its size."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    prompts = torch.randint(
        vocabulary, (work.batch, work.prompt_tokens), generator=generator
    ).tolist()
    pool = new_cuda_slot_pool(
        model,
        work.batch,
        capacity=work.prompt_tokens + work.new_tokens + 64,
        has_replay=torch.cuda.is_available(),
    )
    warm_prompts(pool, prompts)
    others = {
        slot: [token + 1 if token + 1 < vocabulary else 0 for token in prompt]
        for slot, prompt in enumerate(prompts)
    }
    seconds = _timed(lambda: pool.prefill(others))
    prediction = Prediction(executor.cache, work.batch)
    executor.listeners.append(prediction)
    _decode(pool, WARM_STEPS, work.batch)
    statistics = CacheStatistics()
    executor.catch_up()
    executor.listeners.append(statistics)
    decode_seconds = _timed(lambda: _decode(pool, work.new_tokens, work.batch))
    executor.catch_up()
    executor.listeners.remove(statistics)
    executor.listeners.remove(prediction)
    copied = statistics.copies * executor.cache.slot_bytes
    return Result(
        prefill_tokens_per_second=work.batch * work.prompt_tokens / seconds,
        time_to_first_token_seconds=seconds,
        decode_tokens_per_second=work.batch * work.new_tokens / decode_seconds,
        # Captured whole, with all experts resident, a step reports nothing: all were hits.
        hit_rate=statistics.hit_rate if statistics.active else 1.0,
        device_share=statistics.device_share if statistics.active else 1.0,
        link_gigabytes_per_second=copied / decode_seconds / 1e9,
        is_replaying=pool.step.is_replaying,
        why_not=pool.step.why_not,
        slots=executor.cache.num_slots,
        plan_microseconds=statistics.plan_seconds / max(1, statistics.calls) * 1e6,
        predicted_tokens_per_second=_predicted(prediction, work.new_tokens),
        lanes=_busy_seconds(pool, executor, work.batch),
    )


def warm_prompts(pool: CudaSlotPool, prompts: list[list[int]]) -> None:
    """Prefill prompts, one for each slot, until later ones are served as a server's are."""
    for first in range(-(-WARM_PROMPTS // len(prompts))):
        pool.prefill(
            {slot: [*prompt[first:], *prompt[:first]] for slot, prompt in enumerate(prompts)}
        )
        for slot in range(len(prompts)):
            pool.keep(slot, 0)


def _predicted(prediction: Prediction, steps: int) -> float | None:
    try:
        return prediction.decode_tokens_per_second(steps)
    except (AssertionError, TandemError, ValueError):  # a measurement is not lost for it
        return None


def _decode(pool: CudaSlotPool, steps: int, batch: int) -> None:
    for step in range(steps):
        pool.decode(dict.fromkeys(range(batch), 17 + step))


def _timed(work: Any) -> float:
    _synchronize()
    begin = time.perf_counter()
    work()
    _synchronize()
    return time.perf_counter() - begin


def _busy_seconds(pool: CudaSlotPool, executor: HybridExecutor, batch: int) -> dict[str, float]:
    """Return the busy seconds of GPU, link and CPU in a step, by profiler and CPU clock."""
    clock = executor.cache.clock
    cpu_before = clock.cpu_busy
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        seconds = _timed(lambda: _decode(pool, PROFILED_STEPS, batch))
    gpu = link = 0.0
    for event in profile.key_averages():
        if not str(event.device_type).endswith("CUDA"):
            continue
        microseconds = event.self_device_time_total
        if "HtoD" in event.key:
            link += microseconds
        elif "DtoH" not in event.key:
            gpu += microseconds
    return {
        "step_seconds_while_profiled": seconds / PROFILED_STEPS,
        "gpu_seconds": gpu / 1e6 / PROFILED_STEPS,
        "link_seconds": link / 1e6 / PROFILED_STEPS,
        "cpu_seconds": (clock.cpu_busy - cpu_before) / PROFILED_STEPS,
    }


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
