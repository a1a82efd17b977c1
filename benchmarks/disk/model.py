"""Loads the packed model as users do, mapped without slots, or its first layers only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
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
from tandem.hf.runtime import require_runtime
from tandem.hf.token_tables import tables_by_token
from tandem.trace import RoutingTrace


def load_model(job: Job) -> Any:
    """Load all layers; "mapped" leaves the experts to the page cache."""
    options: dict[str, Any] = {
        "dense_dtype": job.dense_dtype,
        "threads": job.threads,
        "eviction": job.eviction,
    }
    if job.system != "mapped":
        return tandem.load(job.folder, **options, expert_memory=job.expert_memory)
    with patch.object(packed_reading, "slots_over", return_value=False):
        return tandem.load(job.folder, **options)


def load_first_layers(job: Job, *, has_slots: bool) -> Any:
    """Load the first layers: into slots that hold all experts, or mapped and read."""
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
    """Forced routing that counts the trace's tokens, and scripts what looking ahead predicts."""

    def __init__(self, inner: Executor, trace: RoutingTrace, accuracy: float | None) -> None:
        """Begin with the trace's first token.

        With `accuracy` each expert of a decode step's token is predicted with this chance, and
        another one instead of it otherwise; without, nothing is predicted. The model's routers
        would predict their own choice.
        """
        super().__init__(inner, trace)
        self.at = 0
        self._accuracy, self._slots = accuracy, inner.store.slots
        self._random = np.random.default_rng(0)

    def begin_step(self, token_ids: Sequence[int], *, is_prefill: bool) -> None:
        """Advance by the step's tokens."""
        if self._slots is not None and len(token_ids) == 1:
            self._slots.script(self._predicted())
        self.at += len(token_ids)
        super().begin_step(token_ids, is_prefill=is_prefill)

    def _predicted(self) -> list[list[int]]:
        """Return the experts that looking ahead predicts for the next token, by layer."""
        chosen = self._trace.experts[self.at % self._trace.num_tokens].astype(np.int64)
        if self._accuracy is None:
            return [[] for _ in chosen]
        others = self._random.integers(self._trace.meta.n_experts, size=chosen.shape)
        is_right = self._random.random(chosen.shape) < self._accuracy
        found: list[list[int]] = np.where(is_right, chosen, others).tolist()
        return found


class RunningModel:
    """One sequence of a model: prompts and decode steps with tokens in a random order.

    Greedy tokens would repeat themselves, and so would their experts.
    """

    def __init__(self, model: Any, room: int, notes: Path | None = None) -> None:
        """Create slots for the sequence, with room for this many tokens.

        With a directory for notes, steps that passed their trial at an earlier start are not tried
        again, as in `tandem run`.
        """
        self.model = model
        generator = Generator(model, speculate="none")
        if notes is not None:
            generator.warm_up(notes)
        self.pool = generator.slot_pool(1, capacity=room)
        vocabulary = model.get_input_embeddings().weight.shape[0]
        random = torch.Generator().manual_seed(0)
        self._ids = torch.randperm(vocabulary, generator=random, device="cpu")
        self._at = 0

    def force(self, trace: RoutingTrace, accuracy: float | None = None) -> NotedRouting:
        """Route all further tokens as in a trace.

        Tables that route by token are changed to say the same, because reads ahead use them.
        """
        runtime = require_runtime(self.model)
        routing = NotedRouting(runtime.executor, trace, accuracy)
        runtime.use(routing)
        ids = self._ids.roll(-self._at)
        chosen = trace.experts[np.arange(len(ids)) % trace.num_tokens].astype(np.int64)
        for layer, table in tables_by_token(self.model, runtime.bound):
            if table.shape[1] != routing.top_k:
                raise SystemExit(
                    f"the routing is of {routing.top_k} experts a token, and a table of the shape "
                    f"has {table.shape[1]}; name a trace of as many, or --routing synthetic"
                )
            table[ids] = torch.from_numpy(chosen[:, layer])
        return routing

    def prompt(self, num_tokens: int) -> None:
        """Start again with a prompt."""
        self.pool.keep(0, 0)
        self.pool.prefill({0: self._tokens(num_tokens)})

    def step(self) -> None:
        """Append a token."""
        self.pool.decode({0: self._tokens(1)[0]})

    def _tokens(self, count: int) -> list[int]:
        places = torch.arange(self._at, self._at + count, device="cpu") % len(self._ids)
        self._at += count
        found: list[int] = self._ids[places].tolist()
        return found
