"""Sequence slots of a KV cache that requests borrow: any of them may be in a step's batch.

A step of n rows is recorded once for each n ([replay](replay.py)); which rows they are is an input
of the record. What a row held stays until another request borrows it, so that the next turn of a
conversation finds its beginning there.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.core.errors import ExecutionError
from tandem.decode.kv_cache.cpu import KvCache
from tandem.decode.model_runner import ModelRunner, StartedRows
from tandem.decode.recording.replay import ReplayedStep
from tandem.experts.execution.executor import CpuExecutor
from tandem.hf.finite import require_finite_logits
from tandem.kernels.attention import Segment
from tandem.kernels.dense import CpuThreads


class BorrowedSlots(Protocol):
    """What a loop needs of a model whose requests come and go."""

    num_rows: int
    can_prefill_in_parts: bool

    @property
    def num_bytes(self) -> int | None:
        """Bytes that the KV cache takes now; None where it is not ours to count."""

    def held(self, row: int) -> Sequence[int]:
        """Return the tokens whose keys and values a row holds."""

    def usable(self, row: int, length: int) -> int:
        """Return with how many of the first `length` tokens that it holds a row can go on."""

    def keep(self, row: int, length: int) -> None:
        """Let a row forget what it holds beyond `length` tokens, which are usable."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Let `target` hold the first tokens that `source` holds, which are usable."""

    def prefill(self, row: int, tokens: Sequence[int]) -> Tensor:
        """Append tokens to a row; return the logits of the one after them: (vocabulary,)."""

    def prefill_with_logits(self, row: int, tokens: Sequence[int]) -> Tensor:
        """Append tokens to a row; return the logits after each: (n_tokens, vocabulary)."""

    def decode(self, tokens: dict[int, int]) -> Tensor:
        """Append one token to each of some rows; return (rows, vocabulary) in their order."""


class _Step(NamedTuple):
    """A decode step of so many rows, with its inputs (n,) and (n, 1)."""

    rows: Tensor
    positions: Tensor
    ids: Tensor
    replayed: ReplayedStep


class SlotPool:
    """Rows on Tandem's KV cache. One call at a time."""

    can_prefill_in_parts = True

    def __init__(
        self,
        model: Any,
        threads: CpuThreads,
        num_rows: int,
        *,
        capacity: int = 0,
        has_replay: bool = True,
        kv_dtype: str = "auto",
    ) -> None:
        """Make `num_rows` rows with room for `capacity` tokens each; they grow.

        `kv_dtype` is as of `KvCache`.
        """
        self.num_rows = num_rows
        self.cache = KvCache(threads, num_rows, max(1, capacity), kv_dtype=kv_dtype)
        self._model = ModelRunner(model, self.cache, threads)
        self._held: list[list[int]] = [[] for _ in range(num_rows)]
        self._has_replay = has_replay
        self._executor = self._model.executor
        self._steps: dict[int, _Step] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that the KV cache takes now: room for the longest row so far, for every row."""
        return self.cache.num_bytes

    def held(self, row: int) -> Sequence[int]:
        """Return the tokens whose keys and values a row holds."""
        return self._held[row]

    def usable(self, row: int, length: int) -> int:
        """Return with how many of the first `length` tokens that it holds a row can go on."""
        return self.cache.usable(row, length)

    def keep(self, row: int, length: int) -> None:
        """Let a row forget what it holds beyond `length` tokens, which are usable."""
        self.cache.truncate(row, length)
        del self._held[row][length:]

    def copy(self, source: int, target: int, length: int) -> None:
        """Let `target` hold the first tokens that `source` holds, and nothing else."""
        self.cache.copy_prefix(source, target, length)
        self._held[target] = self._held[source][:length]

    @torch.inference_mode()
    def prefill(self, row: int, tokens: Sequence[int]) -> Tensor:
        """Append tokens to a row; return the logits of the one after them: (vocabulary,).

        What comes out depends on the row's tokens and on where calls cut them, on nothing else.
        """
        logits = self._prefill(row, tokens, torch.tensor([len(tokens) - 1]))
        self._require_finite([row], logits[-1:])
        return logits[-1]

    @torch.inference_mode()
    def prefill_with_logits(self, row: int, tokens: Sequence[int]) -> Tensor:
        """Append tokens to a row; return the logits after each: (n_tokens, vocabulary)."""
        logits = self._prefill(row, tokens, None)
        self._require_finite([row], logits[-1:])
        return logits

    def _prefill(self, row: int, tokens: Sequence[int], keep: Tensor | None) -> Tensor:
        self._note_executor()
        self.cache.begin([Segment(row, self.cache.lengths[row], len(tokens))])
        logits = self._model.logits(torch.tensor([tokens]), self.cache.positions[None], keep)
        self.cache.commit()
        self._held[row] += tokens
        return logits[0]

    @torch.inference_mode()
    def decode(self, tokens: dict[int, int]) -> Tensor:
        """Append one token to each of some rows; return (rows, vocabulary) in their order."""
        self._note_executor()
        step = self._steps.get(len(tokens)) or self._add_step(len(tokens))
        ids = list(tokens.values())
        self.cache.begin_rows(list(tokens), step.rows, step.positions)
        step.ids.copy_(torch.tensor(ids)[:, None])
        if step.replayed.is_replaying and not isinstance(self._executor, CpuExecutor | None):
            self._executor.begin_step(ids, is_prefill=False)
        logits = step.replayed()
        self.cache.commit()
        for row, token in tokens.items():
            self._held[row].append(token)
        self._require_finite(list(tokens), logits)
        return logits

    def _require_finite(self, rows: Sequence[int], logits: Tensor) -> None:
        """Raise `ExecutionError` for logits (rows, vocabulary) that are not; forget the rows."""
        try:
            require_finite_logits(self._model.model, logits, lambda i: self._held[rows[i]])
        except ExecutionError:
            for row in rows:
                self.keep(row, 0)
            raise

    def _add_step(self, num_rows: int) -> _Step:
        with torch.inference_mode(False):
            rows, positions = (torch.zeros(num_rows, dtype=torch.int64) for _ in range(2))
            ids = torch.zeros((num_rows, 1), dtype=torch.int64)

        def run() -> Tensor:
            return self._model.logits(ids, positions[:, None])[:, -1]

        dtype, threads = self._model.model.dtype, self.cache.threads
        replayed = ReplayedStep(run, [ids, positions], dtype, threads, self._executor)
        if not self._has_replay:
            replayed.why_not = "replay is disabled (has_replay=False)"
        elif getattr(self._executor, "foresee", None) is not None:
            replayed.why_not = "routers are asked ahead, which a recorded step leaves out"
        self._steps[num_rows] = _Step(rows, positions, ids, replayed)
        return self._steps[num_rows]

    def _note_executor(self) -> None:
        """Forget the records of an executor that has been replaced."""
        executor = self._model.executor
        if executor is not self._executor:
            self._executor = executor
            self._steps.clear()


class LoneRow:
    """One row, for models that no pool can step: on Transformers' own caches."""

    num_rows = 1
    can_prefill_in_parts = False
    num_bytes = None

    def __init__(
        self,
        start: Callable[[list[int]], StartedRows],
        all_logits: Callable[[list[int]], Tensor],
    ) -> None:
        """`start` returns the rows of one prompt, of which nothing has been computed.

        `all_logits` runs a prompt by itself; it returns (n_tokens, vocabulary).
        """
        self._start = start
        self._all_logits = all_logits
        self._rows: StartedRows | None = None

    def held(self, row: int) -> Sequence[int]:
        """Return nothing: `start` knows by itself what it can go on with."""
        return ()

    def usable(self, row: int, length: int) -> int:
        """Return nothing, which is what is held."""
        return 0

    def keep(self, row: int, length: int) -> None:
        """Forget everything."""
        assert length == 0
        self._rows = None

    def copy(self, source: int, target: int, length: int) -> None:
        """Do nothing: there is no other row."""

    def prefill(self, row: int, tokens: Sequence[int]) -> Tensor:
        """Run a whole prompt; return (vocabulary,)."""
        assert self._rows is None
        self._rows = self._start(list(tokens))
        return self._rows.prefill()[0]

    def prefill_with_logits(self, row: int, tokens: Sequence[int]) -> Tensor:
        """Run a whole prompt, twice: what goes on from it keeps the last token's logits alone."""
        before = self._all_logits(list(tokens))[:-1]
        return torch.cat([before, self.prefill(row, tokens)[None]])

    def decode(self, tokens: dict[int, int]) -> Tensor:
        """Append the row's token; return (1, vocabulary)."""
        assert self._rows is not None, "decode before prefill"
        return self._rows.decode(list(tokens.values()))
