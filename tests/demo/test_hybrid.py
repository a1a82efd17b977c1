"""Tests of the demo model on the emulated device for all pairs of policies and sizes.

Its experts differ, so a wrong slot would change the tokens, which must be the CPU's.

python -m tests.demo.test_hybrid    all rows, 20 prompts by turns, 64 tokens each
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoTokenizer

from tandem.cli.keeping import cache_dir
from tandem.experts.tracing.cache_statistics import CacheStatistics
from tandem.generate.generator import Generator
from tandem.hf.assembly import assemble
from tandem.hf.checkpoint import open_model
from tandem.hf.config import OffloadConfig
from tandem.hf.load import load_checkpoint
from tandem.kernels.cpu import detect_cpu
from tandem.policy.assignment import ASSIGNMENTS
from tandem.policy.eviction import EVICTIONS
from tandem.sim.systems import POLICIES
from tests.inside import SimulatedConfig, runtime_in

NUM_EXPERTS, TOP_K = 240, 2
SLOTS = (1, TOP_K, 30, NUM_EXPERTS // 2, NUM_EXPERTS)
ROWS_IN_CI = 3
PROMPTS = Path(__file__).parents[1] / "data" / "prompts.json"


class Row(NamedTuple):
    """One combination of options."""

    assignment: str
    eviction: str
    prediction: str
    prefetch: str
    slots: int


def pairwise_rows() -> Iterator[Row]:
    """Yield combinations until every pair has occurred, those with the most new pairs first."""
    values = (
        ASSIGNMENTS.names(),
        EVICTIONS.names(),
        POLICIES.predictions.names(),
        POLICIES.prefetches.names(),
        SLOTS,
    )
    missing = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(values)), 2)
        for a in values[i]
        for b in values[j]
    }

    def pairs(row: Sequence[Any]) -> set[tuple[int, Any, int, Any]]:
        return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}

    every = [Row(*row) for row in itertools.product(*values)]
    while missing:
        # Checking a new part of all rows each time is enough and takes a tenth.
        some = every[len(missing) % 11 :: 11]
        best = max(some, key=lambda row: len(pairs(row) & missing))
        if not pairs(best) & missing:
            best = max(every, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        yield best


def prompts(count: int) -> list[list[dict[str, str]]]:
    """Return the first prompts of the shipped file, as conversations."""
    texts = [prompt["text"] for prompt in json.loads(PROMPTS.read_text())["prompts"]]
    return [[{"role": "user", "content": text[:300]}] for text in texts[:count]]


class Matrix:
    """The demo model, loaded once, and its answers on the CPU alone."""

    def __init__(
        self,
        directory: Path,
        conversations: Sequence[Any],
        max_new_tokens: int,
        threads: int | None = None,
    ) -> None:
        # Linear layers in int8, as in `tandem run`: otherwise most of a step would read them.
        config = SimulatedConfig(
            expert_dtype="int8", dense_dtype="int8", threads=threads, cache_dir=str(cache_dir())
        )
        self.model = load_checkpoint(open_model(directory), config, dtype=torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._conversations = list(conversations)
        self._max_new_tokens = max_new_tokens
        self._loaded: OffloadConfig = runtime_in(self.model).options
        self._expected: dict[tuple[int, ...], list[list[int]]] = {}

    def _answers(self, conversations: Sequence[Any]) -> list[list[int]]:
        # Recorded steps would skip look-ahead, and round differently from the model's own code.
        generator = Generator(self.model, self._tokenizer, has_replay=False)
        answers = generator.generate(
            conversations, max_new_tokens=self._max_new_tokens, temperature=0
        )
        return [answer.token_ids for answer in answers]

    def check(self, row: Row, first: int, count: int) -> CacheStatistics:
        """Answer some prompts as a batch; AssertionError if a token differs from the CPU's."""
        runtime = runtime_in(self.model)
        slot_bytes = max(layer.image_bytes for layer in runtime.store)
        options: OffloadConfig = dataclasses.replace(
            self._loaded,
            device="emulated",
            gpu_memory=str(row.slots * slot_bytes),
            link_bandwidth="4GB/s",
            start_content="random",
            assignment=row.assignment,
            eviction=row.eviction,
            prediction=row.prediction,
            prefetch=row.prefetch,
        )
        chosen = tuple((first + i) % len(self._conversations) for i in range(count))
        conversations = [self._conversations[i] for i in chosen]
        if chosen not in self._expected:  # of the same batch: its size changes the dense parts
            assemble(self.model, runtime, self._loaded)
            self._expected[chosen] = self._answers(conversations)
        assemble(self.model, runtime, options)
        statistics = CacheStatistics()
        runtime.executor.listeners.append(statistics)
        assert self._answers(conversations) == self._expected[chosen], f"{row} differs"
        return statistics


def test_every_pair_of_policies_is_in_the_matrix() -> None:
    rows = list(pairwise_rows())
    assert len({(row.assignment, row.eviction) for row in rows}) == 108
    num_predictions = len(POLICIES.predictions.names())
    assert len({(row.prediction, row.slots) for row in rows}) == num_predictions * len(SLOTS) >= 10


@pytest.mark.demo
@pytest.mark.slow
@pytest.mark.usefixtures("all_threads")
def test_the_hybrid_demo_says_what_the_cpu_says(demo_cache: Path) -> None:
    matrix = Matrix(demo_cache / "models" / "demo", prompts(2), max_new_tokens=8)
    shares = []
    for number, row in zip(range(ROWS_IN_CI), pairwise_rows(), strict=False):
        shares.append(matrix.check(row, number, 1 + number % 2).device_share)
    assert max(shares) > 0.5
    assert min(shares) < 0.5


def run_part(part: int, parts: int) -> int:
    """Check every `parts`-th row from `part` on in its own process; return the number of rows."""
    # torch's threads spin for a while after each operation, on the cores of the kernels' threads.
    torch.set_num_threads(1)
    threads = max(1, detect_cpu().num_threads // parts)
    matrix = Matrix(cache_dir() / "models" / "demo", prompts(20), 64, threads)
    rows = list(pairwise_rows())
    for number in range(part, len(rows), parts):
        hits = matrix.check(rows[number], number, 1).hit_rate
        print(f"{number + 1}/{len(rows)} {' '.join(map(str, rows[number]))}: hits {hits:.0%}")
    return len(range(part, len(rows), parts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    # Half of a step is Python, which more threads do not make faster.
    parser.add_argument("--processes", type=int, default=min(4, detect_cpu().num_threads))
    parts = parser.parse_args().processes
    begin = time.monotonic()
    with ProcessPoolExecutor(parts, mp_context=multiprocessing.get_context("spawn")) as pool:
        count = sum(pool.map(run_part, range(parts), itertools.repeat(parts)))
    print(f"all equal: {count} rows, {parts} processes, {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
