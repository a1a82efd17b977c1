"""Loads the packed model as users do, mapped as before there were slots, or its first layers."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.disk.job import Job

import tandem
from tandem.experts.execution.executor import Executor
from tandem.experts.execution.forced_routing import ForcedRouting
from tandem.generate.generator import Generator
from tandem.hf import packed_reading
from tandem.hf.checkpoint import Checkpoint, open_model
from tandem.hf.config import OffloadConfig
from tandem.hf.disk_tier import slots_over
from tandem.hf.load import load_checkpoint
from tandem.trace import RoutingTrace


def load_model(job: Job) -> Any:
    """Load all layers; "mapped" leaves experts to the page cache."""
    options: dict[str, Any] = {
        "dense_dtype": job.dense_dtype,
        "threads": job.threads,
        "eviction": job.eviction,
    }
    if job.system != "mapped":
        return tandem.load(job.folder, **options)
    with patch.object(packed_reading, "slots_over", return_value=False):
        return tandem.load(job.folder, **options)


def load_first_layers(job: Job, *, has_slots: bool) -> Any:
    """Load some layers whole: into slots that hold all, or mapped and read in."""
    checkpoint = open_model(job.folder)
    assert isinstance(checkpoint, Checkpoint)
    memory = "1TB" if has_slots else "auto"
    options = OffloadConfig(
        dense_dtype=job.dense_dtype, threads=job.threads, expert_memory=memory,
        eviction=job.eviction,
    )  # fmt: skip
    model = load_checkpoint(checkpoint, options, num_layers=job.fit_layers)
    packed_reading.copy_dense_parts(model)
    if has_slots:
        slots_over(model, options)
    else:
        packed_reading.map_packed(model, options)
    return model


class NotedRouting(ForcedRouting):
    """Forced routing that tells which of the trace's tokens come next."""

    def __init__(self, inner: Executor, trace: RoutingTrace) -> None:
        """Begin with the trace's first token."""
        super().__init__(inner, trace)
        self.at = 0

    def begin_step(self, token_ids: Sequence[int], *, is_prefill: bool) -> None:
        """Go on by the step's tokens."""
        self.at += len(token_ids)
        super().begin_step(token_ids, is_prefill=is_prefill)


class RunningModel:
    """One sequence of a model: prompts and decode steps."""

    def __init__(self, model: Any, room: int) -> None:
        """Make slots for the sequence, with room for so many tokens."""
        self.model = model
        self.pool = Generator(model, speculate="none").slot_pool(1, capacity=room)
        self._random = torch.Generator().manual_seed(0)

    def prompt(self, num_tokens: int) -> None:
        """Begin again with a prompt of random tokens."""
        self.pool.keep(0, 0)
        self.pool.prefill({0: self._tokens(num_tokens)})

    def step(self) -> None:
        """Append a random token: the likeliest one repeats itself, and its experts with it."""
        self.pool.decode({0: self._tokens(1)[0]})

    def _tokens(self, count: int) -> list[int]:
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        ids = torch.randint(vocabulary, (count,), generator=self._random, device="cpu")
        found: list[int] = ids.tolist()
        return found
