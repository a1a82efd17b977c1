"""What choosing a token costs: python -m benchmarks.generation.sampling [--vocabulary 151936]

Peaked scores, as a model's are, and flat ones, where nearly every token can win. Medians.
"""

import argparse
import statistics
import time

import torch

from tandem.generate.sampler import Sampler
from tandem.generate.sampling import SamplingRule

RULES = {
    "greedy": SamplingRule(),
    "temperature": SamplingRule(temperature=1.0),
    "top-k 40": SamplingRule(temperature=1.0, top_k=40),
    "top-p 0.9": SamplingRule(temperature=1.0, top_p=0.9),
    "min-p 0.05": SamplingRule(temperature=1.0, min_p=0.05),
    "top-k 40, top-p 0.9, min-p 0.05": SamplingRule(
        temperature=1.0, top_k=40, top_p=0.9, min_p=0.05
    ),
    "repetition penalty": SamplingRule(repetition_penalty=1.1),
}
WIDTHS = {"peaked": 6.0, "flat": 0.5}  # standard deviations of the scores
CALLS = 40


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rows", type=int, default=1)
    options = parser.parse_args()
    history = list(range(0, options.vocabulary, 300))
    for name, rule in RULES.items():
        parts = []
        for kind, width in WIDTHS.items():
            scores = torch.randn(options.rows, options.vocabulary) * width
            sampler = Sampler(rule, options.rows, seed=0)
            seconds = []
            for _ in range(CALLS):
                start = time.perf_counter()
                sampler.choose(scores, [history] * options.rows)
                seconds.append(time.perf_counter() - start)
            parts.append(f"{kind} {statistics.median(seconds) * 1e3:.2f} ms")
        print(f"{name:32} {', '.join(parts)}")


if __name__ == "__main__":
    main()
