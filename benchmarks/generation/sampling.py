"""The cost of choosing a token: python -m benchmarks.generation.sampling [--vocabulary 151936]

Peaked scores, as models have, flat ones, where nearly every token can win, and equal ones. Medians
of calls for one sequence. A rule costs at least a few passes over the scores: one pass is timed
first.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from tandem.generate.sampler import Sampler
from tandem.generate.sampling import SamplingRule

RULES = {
    "greedy": SamplingRule(),
    "temperature": SamplingRule(temperature=1.0),
    "top-k 40": SamplingRule(temperature=1.0, top_k=40),
    "top-p 0.9": SamplingRule(temperature=1.0, top_p=0.9),
    "top-p 0.000001": SamplingRule(temperature=1.0, top_p=1e-6),
    "min-p 0.05": SamplingRule(temperature=1.0, min_p=0.05),
    "repetition penalty": SamplingRule(repetition_penalty=1.1),
    "all of them": SamplingRule(
        repetition_penalty=1.1, temperature=1.0, top_k=40, top_p=0.9, min_p=0.05
    ),
}
WIDTHS = {"peaked": 6.0, "flat": 0.5, "equal": 0.0}  # standard deviations of the scores
CALLS = 40


def median_seconds(call: Callable[[], object]) -> float:
    """Return the median time of some calls."""
    seconds = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--isa", default="")
    options = parser.parse_args()
    history = list(range(0, options.vocabulary, 300))
    scores = torch.randn(options.vocabulary)
    print(f"one pass, torch's maximum: {median_seconds(scores.amax) * 1e3:.3f} ms")
    for name, rule in RULES.items():
        parts = []
        for kind, width in WIDTHS.items():
            scores = torch.randn(options.rows, options.vocabulary) * width
            sampler = Sampler(rule, options.rows, seed=0, isa=options.isa)
            call = partial(sampler.choose, scores, [history] * options.rows)
            parts.append(f"{kind} {median_seconds(call) * 1e3:.2f} ms")
        print(f"{name:32} {', '.join(parts)}")


if __name__ == "__main__":
    main()
