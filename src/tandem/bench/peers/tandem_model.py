"""Tandem as one of the compared systems."""

import statistics
from collections.abc import Sequence
from typing import Any

from tandem.bench.generation import Workload, ceiling_of, measure, measure_machine
from tandem.bench.kernels import KernelBench
from tandem.bench.peers.setting import Choice, Setting, Speeds
from tandem.generate.generator import Generator
from tandem.hf.load import load


class Tandem:
    """Tandem, as `tandem bench` runs it."""

    def __init__(self, setting: Setting) -> None:
        """Load the GGUF file without converting its weights."""
        model = load(
            setting.gguf, dense_dtype="auto", threads=setting.threads, isa=setting.isa or None
        )
        self._prepare(setting, model)

    def _prepare(self, setting: Setting, model: Any) -> None:
        self._setting, self._model = setting, model
        self._generator = Generator(model, kv_dtype=setting.kv_dtype)
        self._bench = KernelBench(num_threads=setting.threads, isa=setting.isa)

    def measure(self, depth: int) -> Speeds:
        """Measure speeds after `depth` tokens, and the ceilings.

        The rates of arithmetic are measured before and after the run, those of reading memory
        between decode steps.
        """
        work = Workload(
            prompt_tokens=self._setting.prompt, new_tokens=self._setting.steps, depth=depth
        )
        before = measure_machine(self._bench)
        found = measure(self._model, self._generator, work, self._bench)
        after = measure_machine(self._bench)
        ceilings = [ceiling_of(self._model, work, c, found.step_bytes) for c in (before, after)]
        return Speeds(
            found.speed.prefill_tokens_per_second,
            found.speed.decode_tokens_per_second,
            found.speed.decode_tokens_per_second / found.decode_share,
            statistics.mean(c.prefill_tokens_per_second for c in ceilings),
        )

    def choices(self, ids: Sequence[int]) -> list[Choice]:
        """Return, for each token of a text, the token that the model would choose next."""
        pool = self._generator.slot_pool(1, capacity=len(ids))
        best = pool.prefill_with_logits(0, list(ids)).float().topk(2, dim=-1)
        margins = best.values[:, 0] - best.values[:, 1]
        return [*map(Choice, best.indices[:, 0].tolist(), margins.tolist())]
