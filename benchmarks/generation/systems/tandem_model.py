"""Tandem: the file that llama.cpp reads, or a shape in formats of its own."""

import statistics
from typing import Any

from benchmarks.generation.systems.setting import Setting, Speeds

from tandem.bench.generation import Workload, ceiling_of, measure, measure_machine
from tandem.bench.kernels import KernelBench
from tandem.bench.model_shapes import ModelShape, find_shape
from tandem.bench.random_model import build_random_model
from tandem.generate.generator import Generator
from tandem.hf.config import OffloadConfig
from tandem.hf.load import load


class Tandem:
    """Tandem, as `tandem bench` runs it."""

    def __init__(self, setting: Setting) -> None:
        """Load the GGUF file, whose codes stay as they are."""
        model = load(
            setting.gguf, dense_dtype="auto", threads=setting.threads, isa=setting.isa or None
        )
        self._prepare(setting, model)

    def _prepare(self, setting: Setting, model: Any) -> None:
        self._setting, self._model = setting, model
        self._generator = Generator(model, kv_dtype=setting.kv_dtype)
        self._bench = KernelBench(num_threads=setting.threads, isa=setting.isa)

    def measure(self, depth: int) -> Speeds:
        """Measure; multiplications at best before and after, reading between decode steps."""
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


class PackedTandem(Tandem):
    """The shape in formats of Tandem's own, with random weights."""

    def __init__(self, setting: Setting, shape: ModelShape | None = None) -> None:
        """Build the model straight in packed form: of a shape, or that of the setting's name."""
        offload = OffloadConfig(
            expert_dtype=setting.expert_dtype, threads=setting.threads, isa=setting.isa or None
        )
        model = build_random_model(
            shape or find_shape(setting.shape), offload, dense_dtype=setting.dense_dtype,
            num_layers=setting.layers, vocabulary=setting.vocabulary,
        )  # fmt: skip
        self._prepare(setting, model)
