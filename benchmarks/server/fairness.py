"""The effect of a long prompt on concurrent streams: python -m benchmarks.server.fairness

Some streams run when a long prompt arrives; their gaps and rates before and beside it are compared,
with the pace of `tandem serve --max-gap` and without. Only the scheduler is measured, on a released
shape with fewer layers and random weights. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from typing import Any

import tandem
from tandem.bench.model_shapes import find_shape
from tandem.bench.random_model import build_random_model
from tandem.generate.pace import Pace
from tandem.generate.request import Request
from tandem.generate.sampling import SamplingOptions
from tandem.generate.scheduler import Scheduler
from tandem.hf.config import OffloadConfig

_STEPS_BEFORE = 60
_LONG = 100


def request(number: int, prompt_tokens: int, new_tokens: int) -> Request:
    """Return a request that ends by its length."""
    return Request(
        request_id=number,
        prompt=tuple(100 + (number * 997 + i * 31) % 20_000 for i in range(prompt_tokens)),
        options=SamplingOptions(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True),
    )


def measure(scheduler: Scheduler, num_streams: int, prompt_tokens: int) -> dict[str, float]:
    """Return the streams' rates and gaps before a long prompt and beside it."""
    for number in range(num_streams):
        scheduler.add(request(number, 20, 100_000))
    while scheduler.counts.decode_steps < 5:
        scheduler.step()
    before = gaps_of(scheduler, lambda numbers, gaps: len(gaps) == _STEPS_BEFORE)
    scheduler.add(request(_LONG, prompt_tokens, 1))
    begin = time.perf_counter()
    during = gaps_of(scheduler, lambda numbers, gaps: _LONG in numbers)
    seconds = time.perf_counter() - begin
    for number in range(num_streams):
        scheduler.cancel(number)
    return {
        "rate_kept": len(during) / sum(during) * statistics.mean(before),
        "gap_before_seconds": statistics.median(before),
        "gap_p95_seconds": sorted(during)[int(0.95 * len(during))],
        "gap_longest_seconds": max(during),
        "prompt_seconds": seconds,
    }


def gaps_of(scheduler: Scheduler, is_over: Any) -> list[float]:
    """Step until the work is done; return the times between the first stream's tokens."""
    gaps: list[float] = []
    latest = time.perf_counter()
    numbers: set[int] = set()
    while not is_over(numbers, gaps):
        numbers = {output.request_id for output in scheduler.step()}
        if 0 in numbers:
            now = time.perf_counter()
            gaps.append(now - latest)
            latest = now
    return gaps


def main() -> None:
    """Measure with and without pace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=3)
    parser.add_argument("--max-gap", type=float, default=0.5)
    options = parser.parse_args()
    model = build_random_model(
        find_shape(options.shape), OffloadConfig(expert_dtype="int4"),
        num_layers=options.layers,
    )  # fmt: skip
    generator = tandem.Generator(model)
    found: dict[str, Any] = {}
    for name, pace in (("without", None), ("paced", Pace(options.max_gap))):
        scheduler = generator.scheduler(options.streams + 1, pace=pace)
        found[name] = measure(scheduler, options.streams, options.tokens)
        print(name, ", ".join(f"{key} {value:.3g}" for key, value in found[name].items()))
    print(json.dumps({**vars(options), **found}))


if __name__ == "__main__":
    main()
