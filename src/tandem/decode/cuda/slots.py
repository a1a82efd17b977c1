"""Sequence slots on a GPU that requests borrow: any of them may be in a step's batch.

A step goes through the first 1, 2, 4, 8... rows, so that few sizes are captured. Rows among them
that have no token take part with whatever they had last: their choice of experts becomes padding,
and what they write lies behind what they hold.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.core.errors import CapacityError
from tandem.decode.cuda.graphs import Capture, GraphedStep
from tandem.decode.cuda.resident_layers import UncutLayers, uncut_layers
from tandem.decode.kv_cache.cuda import StaticKvCache, on_its_way
from tandem.decode.model_runner import ModelRunner
from tandem.experts.cache.expert_cache import SHRINK
from tandem.experts.execution.passing_executor import PassingExecutor
from tandem.experts.tracing.events import unheard
from tandem.hf.opaque_calls import intercepted
from tandem.kernels.attention import Segment

# Bounds the activations of a long prompt; fetched experts serve this many tokens.
MAX_STEP_TOKENS = 2048

MakeCapture = Callable[[], Capture]


class _Step(NamedTuple):
    """A decode step of so many rows at one reach."""

    graphed: GraphedStep
    uncut: list[UncutLayers]
    """What computes layers inside its pieces, from its capture on; at most one."""


class _Announced:
    """Keeps the model from announcing a step itself: to read token ids back would wait."""

    is_capturing = True

    def call(self, kind: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return function(*args)


class CudaSlotPool:
    """Rows on a KV cache that stays where it is. One call at a time."""

    can_prefill_in_parts = True

    def __init__(
        self,
        model: Any,
        num_rows: int,
        *,
        capacity: int = 0,
        make_capture: MakeCapture | None = None,
    ) -> None:
        """Make rows with room for `capacity` tokens each; they grow.

        Without `make_capture` steps run as they are. Raises `NotByRowsError` for a model that keeps
        more than keys and values.
        """
        self.num_rows = num_rows
        self.cache = StaticKvCache(num_rows, max(1, capacity), model.device, self._make_room)
        self._model = ModelRunner(model, self.cache)
        self._device, self._make_capture = model.device, make_capture
        self._held: list[list[int]] = [[] for _ in range(num_rows)]
        self._steps: dict[tuple[int, int], _Step] = {}  # by rows and reach, of one generation
        self._generation = 0
        self._captured_for: tuple[Any, ...] = ()
        self._last: _Step | None = None
        self._active = [True] * num_rows
        with torch.inference_mode(False):
            self._ids = torch.zeros((num_rows, 1), dtype=torch.int64, device=self._device)
            self._is_idle = torch.zeros((num_rows, 1), dtype=torch.bool, device=self._device)

    @property
    def num_bytes(self) -> int:
        """Bytes that the KV cache takes now: room for the longest row so far, for every row."""
        return self.cache.num_bytes

    @property
    def step(self) -> GraphedStep:
        """The decode step that was done last, or else that of all rows."""
        return (self._last or self._step_at(self.num_rows)).graphed

    def held(self, row: int) -> Sequence[int]:
        """Return the tokens whose keys and values a row holds."""
        return self._held[row]

    def usable(self, row: int, length: int) -> int:
        """Return with how many of the first `length` tokens that it holds a row can go on: all."""
        return length

    def keep(self, row: int, length: int) -> None:
        """Let a row forget what it holds beyond `length` tokens."""
        self.cache.truncate(row, length)
        del self._held[row][length:]

    def copy(self, source: int, target: int, length: int) -> None:
        """Let `target` hold the first tokens that `source` holds, and nothing else."""
        self.cache.copy_prefix(source, target, length)
        self._held[target] = self._held[source][:length]

    def pretend(self, depth: int, room: int) -> None:
        """Let every row hold `depth` invented tokens, with room for more; to time a step.

        Needs a prompt before it, which makes the KV cache's layers.
        """
        self.cache.reserve(depth + room)
        self.cache.pretend(depth)
        self._held = [[-1] * depth for _ in self._held]

    @torch.inference_mode()
    def prefill(self, row: int, tokens: Sequence[int]) -> Tensor:
        """Append tokens to a row; return the logits of the one after them: (vocabulary,)."""
        return self._prefill_all(row, tokens, keep=1)[-1]

    @torch.inference_mode()
    def prefill_with_logits(self, row: int, tokens: Sequence[int]) -> Tensor:
        """Append tokens to a row; return the logits after each: (n_tokens, vocabulary)."""
        return self._prefill_all(row, tokens, keep=None)

    def _prefill_all(self, row: int, tokens: Sequence[int], *, keep: int | None) -> Tensor:
        self._tell()
        first = self.cache.lengths[row]
        found: list[Tensor] = []
        with _on(self._device):
            for start in range(0, len(tokens), MAX_STEP_TOKENS):
                piece = tokens[start : start + MAX_STEP_TOKENS]
                prefill = partial(self._prefill, row, first + start, piece, keep)
                logits = self._with_room(prefill)
                found = [*found, logits] if keep is None else [logits]
                self._held[row] += piece
        return found[0] if len(found) == 1 else torch.cat(found)

    @torch.inference_mode()
    def decode(self, tokens: dict[int, int]) -> Tensor:
        """Append one token to each of some rows; return (rows, vocabulary) in their order."""
        rows, ids = list(tokens), list(tokens.values())
        count = min(self.num_rows, 1 << max(rows).bit_length())
        with _on(self._device):
            self._follow_executor()
            self.cache.begin_decode(rows, count)
            self._bring(tokens)
            executor = self._model.executor
            if executor is not None:
                executor.begin_step(ids, is_prefill=False)
            logits = self._with_room(partial(self._decode, count))
            self.cache.commit()
            for row, token in tokens.items():
                self._held[row].append(token)
            if rows == list(range(len(rows))):
                return logits[: len(rows)]
            return logits[on_its_way(rows, self._device).to(self._device, non_blocking=True)]

    def _prefill(self, row: int, first: int, tokens: Sequence[int], keep: int | None) -> Tensor:
        self.cache.begin(Segment(row, first, len(tokens)))
        executor = self._model.executor
        if executor is not None:
            executor.begin_step(tokens, is_prefill=len(tokens) > 1)
        ids = on_its_way(list(tokens), self._device).to(self._device, non_blocking=True)
        places = torch.arange(first, first + len(tokens), device=self._device)
        with intercepted(_Announced()):
            logits = self._model.logits(ids[None], places[None], keep)[0]
        self.cache.commit()
        return logits

    def _decode(self, count: int) -> Tensor:
        step = self._last = self._step_at(count)
        if not step.graphed.is_replaying:
            return step.graphed()
        for uncut in step.uncut:
            uncut.begin_step()
        logits = step.graphed()
        for uncut in step.uncut:
            uncut.end_step()
        return logits

    def _tell(self) -> None:
        """Let listeners hear of the layers of the last step, if they were part of its pieces."""
        for step in self._steps.values():
            for uncut in step.uncut:
                uncut.tell()

    def _bring(self, tokens: dict[int, int]) -> None:
        """Queue the step's token ids, and which rows have none if that has changed."""
        ids = [tokens.get(row, 0) for row in range(self.num_rows)]
        self._ids.copy_(on_its_way(ids, self._device)[:, None], non_blocking=True)
        active = [row in tokens for row in range(self.num_rows)]
        if active != self._active:
            self._active = active
            idle = on_its_way([not row for row in active], self._device)
            self._is_idle.copy_(idle[:, None], non_blocking=True)

    def _follow_executor(self) -> None:
        """Drop what was captured for another executor, other slots, or before all were resident."""
        self._tell()
        executor = self._model.executor
        settle = getattr(innermost(executor), "settle", None)
        if settle is not None:  # a replay of whole steps would never come to it
            settle()
        engine = getattr(getattr(executor, "cache", None), "engine", None)
        now = (executor, engine, uncut_layers(executor) is not None)
        if len(self._captured_for) != len(now) or any(
            a is not b for a, b in zip(now, self._captured_for, strict=True)
        ):
            self._captured_for = now
            self._steps.clear()

    def _step_at(self, count: int) -> _Step:
        if self._generation != self.cache.generation:
            self._generation = self.cache.generation
            self._steps.clear()
        key = count, self.cache.reach
        if key not in self._steps:
            self._steps[key] = self._new_step(count)
        return self._steps[key]

    def _new_step(self, count: int) -> _Step:
        ids, positions, is_idle = (
            tensor[:count] for tensor in (self._ids, self.cache.positions, self._is_idle)
        )
        uncut: list[UncutLayers] = []

        def run() -> Tensor:
            return self._model.logits(ids, positions[:, None], 1)[:, -1]

        def pad(index: Tensor) -> Tensor:
            return index if count == 1 else index.masked_fill(is_idle, -1)

        def find_uncut() -> UncutLayers | None:
            layers = uncut_layers(self._model.executor)
            if layers is not None:
                layers.prepare(count)
            uncut[:] = [] if layers is None else [layers]
            return layers

        graphed = GraphedStep(
            run,
            self._model.model.dtype,
            self._make_capture,
            find_uncut,
            pad=pad,
            make_room=self._make_room,
            unheard=lambda: unheard(self._model.executor),
            deferring=self._deferring,
        )
        if getattr(innermost(self._model.executor), "foresee", None) is not None:
            graphed.why_not = "routers are asked ahead, which captured pieces leave out"
        return _Step(graphed, uncut)

    def _deferring(self) -> contextlib.AbstractContextManager[None]:
        executor = self._model.executor
        return contextlib.nullcontext() if executor is None else executor.deferring()

    def _with_room(self, work: Callable[[], Tensor]) -> Tensor:
        """Do some work; where the GPU has no memory for it, experts make room and it is repeated.

        Raises `CapacityError` when there is none left to make.
        """
        while True:
            try:
                return work()
            except torch.OutOfMemoryError as error:
                if not self._make_room():
                    first_line = str(error).partition("\n")[0]
                    raise CapacityError(
                        f"the GPU has no memory left for this step ({first_line}); use fewer or "
                        "shorter prompts at once, or more gpu_memory"
                    ) from error
            self._follow_executor()  # what was captured may read slots that are gone

    def _make_room(self) -> bool:
        """Give some of the expert cache's memory to whatever needs it; False if there is none."""
        cache = getattr(innermost(self._model.executor), "cache", None)
        if cache is None or cache.num_slots == 0:
            return False
        cache.resize(int(cache.num_slots * SHRINK))
        return True


def innermost(executor: Any) -> Any:
    """Return what computes the experts, behind those that only pass calls on."""
    while isinstance(executor, PassingExecutor):
        executor = executor.inner
    return executor


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a GPU the current one, on which streams are looked up and kernels launched."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
