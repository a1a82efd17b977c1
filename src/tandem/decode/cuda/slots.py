"""Sequence slots on a GPU: a step has tokens of any slots, also several of one slot.

A step has 1, 2, 4, 8... tokens, so that few sizes are captured; its slots are an input. Padding
tokens fill a step up to its size: they choose no experts, and they write after a slot's contents.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.core.errors import CapacityError, TandemError
from tandem.decode.cuda.attention import kernels_for, state_kernels, stream_kernels
from tandem.decode.cuda.fusion import fuse_for_gpu
from tandem.decode.cuda.graphs import (
    TOLERANCES,
    Announced,
    GraphLayers,
    new_graphed_step,
    recorded_for_capture,
)
from tandem.decode.cuda.handed_graph import handed_graph
from tandem.decode.cuda.resident_layers import GraphedLayers, graphed_layers
from tandem.decode.cuda.step_inputs import StepInputs
from tandem.decode.model_runner import ModelRunner, tolerance_of
from tandem.decode.slots import EACH_TOKEN_SEEN, CachedSlotPool
from tandem.decode.token_routed import TokenRouted
from tandem.decode.trial import NOT_IN_SLOTS, why_other_logits
from tandem.devices.cuda.captures import Capture, CudaCapture
from tandem.devices.cuda.embedding import StepRows, given_rows
from tandem.devices.cuda.host_twin import on_its_way
from tandem.experts.cache.expert_cache import SHRINK
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.foreign_types import PreTrainedModel
from tandem.hf.steps import MAX_STEP_TOKENS
from tandem.kernels.attention import Segment
from tandem.kernels.opaque_calls import intercepted
from tandem.kv_cache.cuda.cache import StaticKvCache
from tandem.kv_cache.cuda.layers import DecodeKernels
from tandem.kv_cache.stand_ins import sees_all
from tandem.recording.replay import ReplayedStep

MakeCapture = Callable[[], Capture]


class _Step(NamedTuple):
    """A decode step of one size and one form."""

    replayed: ReplayedStep
    resident: list[GraphedLayers]
    """What computes layers inside its segments, from its capture on; at most one."""


class CudaSlotPool(CachedSlotPool[StaticKvCache]):
    """Slots on a KV cache at fixed addresses."""

    def __init__(
        self,
        model: PreTrainedModel,
        num_slots: int,
        *,
        capacity: int = 0,
        make_capture: MakeCapture | None = None,
        kv_dtype: str = "auto",
        notes_hidden: bool = False,
        find_kernels: Callable[[PreTrainedModel], DecodeKernels | None] = kernels_for,
        layers: GraphLayers | None = None,
    ) -> None:
        """Make slots with room for `capacity` tokens each; they grow.

        `kv_dtype` is the dtype of keys and values; `find_kernels` returns a model's attention
        kernels. Without `make_capture` steps are not captured; `layers` compute the experts of
        captured steps, in place of the executor's own object. With `notes_hidden`, `hidden` and
        `on_hidden` report the output head's input, on the host. Raises `NotInSlotsError` for a
        model that keeps more than keys and values.
        """
        # Kernels attend to all positions, or to windows and compressed keys; torch to positions
        # that an indexer has selected.
        found = find_kernels(model)
        of_all = found if sees_all(model) else None
        self._layers = layers
        cache = StaticKvCache(
            num_slots, max(1, capacity), model.device, self._make_room, kv_dtype=kv_dtype,
            kernels=of_all, window_kernels=found, state_kernels=state_kernels(found),
            stream_kernels=stream_kernels(found),
        )  # fmt: skip
        super().__init__(ModelRunner(model, cache, notes_hidden=notes_hidden), cache)
        self._kernels = found if cache.has_compressed else of_all
        self._launches_kernels = found is not None
        self._device, self._make_capture = model.device, make_capture
        self._steps: dict[tuple[Any, ...], _Step] = {}  # by size and form, of one generation
        self._inputs: dict[int, StepInputs] = {}  # by size
        self._generation = 0
        self._captured_for: tuple[Any, ...] = ()
        self._last: _Step | None = None
        self._embeddings = model.get_input_embeddings()
        self._prompt_rows = StepRows(self._embeddings, 0)
        self._token_routed = TokenRouted(model)

    @property
    def step(self) -> ReplayedStep:
        """The last decode step, or that of all slots."""
        return (self._last or self._step_at(_padded_size(self.num_slots))).replayed

    @torch.inference_mode()
    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> Tensor:
        """Append tokens to slots; return the logits after each slot's last: (slots, vocabulary)."""
        logits = torch.stack(
            [self._prefill_all(slot, tokens, keep=1)[-1] for slot, tokens in prompts.items()]
        )
        self._require_finite(list(prompts), logits)
        return logits

    def _prefill_all(self, slot: int, tokens: Sequence[int], *, keep: int | None = None) -> Tensor:
        self._report()
        first = self.cache.lengths[slot]
        found: list[Tensor] = []
        with _on(self._device):
            for start in range(0, len(tokens), MAX_STEP_TOKENS):
                chunk = tokens[start : start + MAX_STEP_TOKENS]
                prefill = partial(self._prefill, slot, first + start, chunk, keep)
                with self._going_back([slot]):
                    logits = self._with_room(prefill, [slot])
                found = [*found, logits] if keep is None else [logits]
                self._held[slot] += chunk
                hidden = self._model.hidden
                self._tell_hidden(None if hidden is None else hidden[0].cpu(), [(slot, chunk)])
        return found[0] if len(found) == 1 else torch.cat(found)

    @property
    def why_no_drafts(self) -> str | None:
        """Why `verify` takes one token per slot; None: it takes several."""
        executor = self._model.executor
        return None if executor is None or executor.takes_drafts else EACH_TOKEN_SEEN

    @torch.inference_mode()
    def verify(self, tokens: Mapping[int, Sequence[int]]) -> Tensor:
        """Append tokens to slots in one decode step; return the logits after each token.

        They are (n_tokens, vocabulary), slot by slot.
        """
        slots, ids = list(tokens), [token for new in tokens.values() for token in new]
        count = _padded_size(len(ids))
        with _on(self._device):
            self._follow_executor()
            self.cache.begin_decode({slot: len(new) for slot, new in tokens.items()}, count)
            self._inputs_of(count).bring(ids)
            executor = self._model.executor
            self._token_routed.expect(ids, executor)
            if executor is not None:
                executor.begin_step(ids, is_prefill=False)
            with self._going_back(slots):
                is_replaying = self._step_at(count).replayed.is_replaying
                can_repeat = not (self.cache.states and is_replaying)
                logits = self._with_room(partial(self._decode, count), slots, can_repeat=can_repeat)
                self.cache.commit()
            for slot, new in tokens.items():
                self._held[slot] += new
            # Two more launches; the sampler waits for the step anyway.
            slots_of_tokens = [slot for slot, new in tokens.items() for _ in new]
            self._require_finite(slots_of_tokens, logits[: len(ids)])
            hidden = self._inputs_of(count).hidden
            hidden = None if hidden is None else hidden[: len(ids)].cpu()
            self._tell_hidden(hidden, tokens.items())
            return logits[: len(ids)]

    def _prefill(self, slot: int, first: int, tokens: Sequence[int], keep: int | None) -> Tensor:
        self.cache.begin(Segment(slot, first, len(tokens)))
        executor = self._model.executor
        self._token_routed.expect(tokens, executor)
        if executor is not None:
            executor.begin_step(tokens, is_prefill=len(tokens) > 1)
        ids = on_its_way(list(tokens), self._device).to(self._device, non_blocking=True)
        positions = torch.arange(first, first + len(tokens), device=self._device)
        with intercepted(Announced()), given_rows(self._prompt_rows.of_prompt(tokens)):
            logits = self._model.logits(ids[None], positions[None], keep)[0]
        self.cache.commit()
        return logits

    def _decode(self, count: int) -> Tensor:
        step = self._last = self._step_at(count)
        if not step.replayed.is_replaying:
            return step.replayed()
        for layers in step.resident:
            layers.begin_step()
        logits = step.replayed()
        for layers in step.resident:
            layers.end_step()
        self._report(but=step)
        return logits

    def _report(self, but: _Step | None = None) -> None:
        """Report the layers of segments to listeners, except those of a step's last replay."""
        for step in self._steps.values():
            for layers in step.resident:
                layers.report(but=int(step is but))

    def _inputs_of(self, count: int) -> StepInputs:
        if count not in self._inputs:
            self._inputs[count] = StepInputs(
                self._embeddings, count, self._device, self._model.room_for_hidden
            )
        return self._inputs[count]

    def _follow_executor(self) -> None:
        """Drop steps that were captured for another executor, other slots, or partial residency."""
        executor = self._model.executor
        if executor is not None:
            executor.settle()  # a replay of whole steps would never come to it
        cache = None if executor is None else executor.cache
        engine = None if cache is None else cache.engine
        now = (executor, engine, graphed_layers(executor) is not None)
        if len(self._captured_for) != len(now) or any(
            a is not b for a, b in zip(now, self._captured_for, strict=True)
        ):
            self._captured_for = now
            self._drop_steps()

    def _drop_steps(self) -> None:
        self._report()
        self._steps.clear()

    def _step_at(self, count: int) -> _Step:
        if self._generation != self.cache.generation:
            self._generation = self.cache.generation
            self._drop_steps()
        key = count, *self.cache.form
        if key not in self._steps:
            self._steps[key] = self._new_step(count)
        return self._steps[key]

    @torch.inference_mode()
    def launch_once(self, count: int) -> None:
        """Run the operations of a captured step of `count` tokens; capture and keep nothing.

        This compiles and loads its kernels. Raises `NotRecordableError`, and errors of the kernels.
        """
        if not self._launches_kernels:
            return
        with _on(self._device):
            each = dict.fromkeys(range(count), 1)
            self.cache.begin_decode(each, count)
            self._inputs_of(count).bring([0] * count)
            with intercepted(Announced()):
                self._run(count)  # makes what is made on first use
                if self._kernels is not None:
                    self.cache.begin_decode(each, count)
                    self._recorded(count)()

    def _run(self, count: int) -> Tensor:
        """Run a step of `count` tokens by the model's own code."""
        inputs, positions = self._inputs_of(count), self.cache.places(count).positions
        with given_rows(inputs.embedded):
            logits = self._model.logits(inputs.ids, positions[:, None], 1)[:, -1]
        if inputs.hidden is not None and self._model.hidden is not None:
            inputs.hidden.copy_(self._model.hidden[:, -1])
        return logits

    def _pad(self, count: int, index: Tensor) -> Tensor:
        return index if count == 1 else index | self._inputs_of(count).idle  # one kernel

    def _recorded(self, count: int) -> Callable[[], Tensor]:
        """Record a step of `count` tokens and return it in fewer operations."""
        places = self.cache.places(count)
        changing = [*self._inputs_of(count).tensors, places.slots, places.positions, places.runs]
        run, pad = partial(self._run, count), partial(self._pad, count)
        return recorded_for_capture(run, changing, fuse_for_gpu, pad).run

    def _new_step(self, count: int) -> _Step:
        resident: list[GraphedLayers] = []

        def find_layers() -> GraphLayers | None:
            if self._layers is not None:
                return self._layers
            layers = graphed_layers(self._model.executor)
            resident[:] = [] if layers is None else [layers]
            if layers is None:
                return handed_graph(self._model.executor, count)
            layers.prepare(count)
            return layers

        has_replay = self._make_capture is not None
        replayed = new_graphed_step(
            partial(self._run, count),
            tolerance_of(self._model.model, TOLERANCES),
            self._make_capture or _no_capture,
            find_layers,
            pad=partial(self._pad, count),
            executor=self._model.executor,
            make_room=self._make_room,
            deferring=self._deferring,
            save=lambda: self.cache.states.save(self.cache.slots.tolist()),
            record_first=None if self._kernels is None else partial(self._recorded, count),
            is_like_trusted=any(s.replayed.is_replaying for s in self._steps.values()),
            why_not=self._model.why_not_replayed(TOLERANCES, has_replay=has_replay),
        )
        return _Step(replayed, resident)

    def _deferring(self) -> contextlib.AbstractContextManager[None]:
        executor = self._model.executor
        return contextlib.nullcontext() if executor is None else executor.deferring()

    def _with_room(
        self, work: Callable[[], Tensor], slots: Sequence[int], *, can_repeat: bool = True
    ) -> Tensor:
        """Run some work; if the GPU is out of memory, shrink the expert cache and repeat it.

        The slots' states are copied before, unless `can_repeat` is false: those of a replayed step
        are too large to copy for each token. Raises `CapacityError` if no more memory can be freed.
        """
        while True:
            put_back = _nothing
            try:
                put_back = self.cache.states.save(slots if can_repeat else ())
                return work()
            except torch.OutOfMemoryError as error:
                if not (self._make_room() and can_repeat):
                    first_line = str(error).partition("\n")[0]
                    raise CapacityError(
                        f"the GPU has no memory left for this step ({first_line}); use fewer or "
                        "shorter prompts at once, or more gpu_memory"
                    ) from error
            put_back()
            self._follow_executor()  # what was captured may read slots that are gone

    def _make_room(self) -> bool:
        """Give some of the expert cache's memory to others; False if there is none."""
        executor = self._model.executor
        if not isinstance(executor, HybridExecutor) or executor.cache.num_slots == 0:
            return False
        executor.resize_now(int(executor.cache.num_slots * SHRINK))
        return True


def make_cuda_capture(model: PreTrainedModel) -> MakeCapture:
    """Return a factory of captures on a model's GPU; all use one stream."""
    stream = torch.cuda.Stream(model.device)
    return lambda: CudaCapture(model.device, stream)


def new_cuda_slot_pool(
    model: PreTrainedModel,
    num_slots: int,
    *,
    capacity: int = 0,
    has_replay: bool = True,
    kv_dtype: str = "auto",
    notes_hidden: bool = False,
) -> CudaSlotPool:
    """Return slots on the model's GPU; their steps are captured if `has_replay` allows it."""
    make_capture = make_cuda_capture(model) if has_replay else None
    return CudaSlotPool(
        model, num_slots, capacity=capacity, make_capture=make_capture, kv_dtype=kv_dtype,
        notes_hidden=notes_hidden,
    )  # fmt: skip


def why_no_cuda_slots(model: PreTrainedModel) -> str | None:
    """Run a few tokens both ways; return why `CudaSlotPool` cannot serve a model, or None.

    Raises `CapacityError` if the GPU has too little memory for that.
    """
    return why_other_logits(model, lambda num_slots: CudaSlotPool(model, num_slots))


def slot_bytes(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> int | None:
    """Return the bytes of a slot of `num_tokens`, measured with a prompt; None: no slots."""
    try:
        pool = CudaSlotPool(model, 1)
        pool.prefill({0: prompt})
    except TandemError:
        raise
    except NOT_IN_SLOTS:
        return None
    cache = pool.cache
    of_any_length = cache.windows.ring_bytes + cache.states.step_bytes
    of_tokens = cache.kv_bytes - cache.windows.ring_bytes
    return of_tokens // cache.capacity * num_tokens + of_any_length


def _padded_size(num_tokens: int) -> int:
    """Return the size that a step of `num_tokens` is padded to: a power of two."""
    return 1 << (num_tokens - 1).bit_length()


def _nothing() -> None:
    pass


def _no_capture() -> Capture:
    raise AssertionError("a step that is not replayed is not captured")


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a GPU the current one, which decides the streams and the place of launches."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
