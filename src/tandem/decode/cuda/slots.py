"""Sequence slots on a GPU: a step has tokens of any slots, also several of one slot."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from tandem.core.errors import CapacityError, TandemError
from tandem.decode.cuda.attention import kernels_for, state_kernels, stream_kernels
from tandem.decode.cuda.graphs import (
    Announced,
    GraphLayers,
)
from tandem.decode.cuda.steps import MakeCapture, Step, Steps, padded_size
from tandem.decode.model_runner import ModelRunner
from tandem.decode.slots import EACH_TOKEN_SEEN, CachedSlotPool
from tandem.decode.token_routed import TokenRouted
from tandem.decode.trial import NOT_IN_SLOTS, why_other_logits
from tandem.devices.cuda.captures import CudaCapture
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


class CudaSlotPool(CachedSlotPool[StaticKvCache]):
    """Computes the steps of several slots on a GPU, on a KV cache at fixed addresses."""

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
        """Make slots with room for `capacity` tokens each; slots grow as needed.

        `kv_dtype` is the dtype of keys and values; `find_kernels` returns a model's attention
        kernels. Without `make_capture`, steps are not captured. If `layers` is given, it computes
        the experts of captured steps instead of the `GraphLayers` that suit the executor. With
        `notes_hidden`, `hidden` and `on_hidden` report the output head's input, on the host. Raises
        `NotInSlotsError` if the model's layers keep data of tokens that the KV cache cannot hold.
        """
        # Kernels attend to all positions, or to windows and compressed keys; torch to positions
        # that an indexer has selected.
        found = find_kernels(model)
        of_all = found if sees_all(model) else None
        cache = StaticKvCache(
            num_slots, max(1, capacity), model.device, self._make_room, kv_dtype=kv_dtype,
            kernels=of_all, window_kernels=found, state_kernels=state_kernels(found),
            stream_kernels=stream_kernels(found),
        )  # fmt: skip
        super().__init__(ModelRunner(model, cache, notes_hidden=notes_hidden), cache)
        records = (found if cache.has_compressed else of_all) is not None
        self._launches_kernels = found is not None
        self._device = model.device
        self._steps = Steps(
            self._model, cache, records=records, make_capture=make_capture,
            make_room=self._make_room, layers=layers,
        )  # fmt: skip
        self._last: Step | None = None
        self._prompt_rows = StepRows(model.get_input_embeddings(), 0)
        self._token_routed = TokenRouted(model)

    @property
    def step(self) -> ReplayedStep:
        """The latest decode step; before the first one, a step of one token in each slot."""
        return (self._last or self._steps.at(padded_size(self.num_slots))).replayed

    @property
    def prompt_steps(self) -> list[Step]:
        """The steps that compute prompts, captured or about to be."""
        return [step for key, step in self._steps.by_size.items() if key[1]]

    @torch.inference_mode()
    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> Tensor:
        """Append tokens to some slots; return the logits after each slot's last token.

        The logits are (slots, vocabulary), in the order of `prompts`.
        """
        logits = torch.stack(
            [self._prefill_all(slot, tokens, keep=1)[-1] for slot, tokens in prompts.items()]
        )
        self._require_finite(list(prompts), logits)
        return logits

    def _prefill_all(self, slot: int, tokens: Sequence[int], *, keep: int | None = None) -> Tensor:
        self._steps.report()
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
        """Why `verify` must get only one token per slot; None if it accepts several."""
        executor = self._model.executor
        return None if executor is None or executor.takes_drafts else EACH_TOKEN_SEEN

    @torch.inference_mode()
    def verify(self, tokens: Mapping[int, Sequence[int]]) -> Tensor:
        """Append tokens to slots in one decode step; return the logits after each token.

        The logits are (n_tokens, vocabulary), slot by slot.
        """
        slots, ids = list(tokens), [token for new in tokens.values() for token in new]
        count = padded_size(len(ids))
        with _on(self._device):
            self._steps.follow_executor()
            self.cache.begin_decode({slot: len(new) for slot, new in tokens.items()}, count)
            self._steps.inputs_of(count).upload(ids)
            executor = self._model.executor
            self._token_routed.expect(ids, executor)
            if executor is not None:
                executor.begin_step(ids, is_prefill=False)
            with self._going_back(slots):
                is_replaying = self._steps.at(count).replayed.is_replaying
                can_repeat = not (self.cache.states and is_replaying)
                logits = self._with_room(partial(self._decode, count), slots, can_repeat=can_repeat)
                self.cache.commit()
            for slot, new in tokens.items():
                self._held[slot] += new
            # Two more launches; the sampler waits for the step anyway.
            slots_of_tokens = [slot for slot, new in tokens.items() for _ in new]
            self._require_finite(slots_of_tokens, logits[: len(ids)])
            hidden = self._steps.inputs_of(count).hidden
            hidden = None if hidden is None else hidden[: len(ids)].cpu()
            self._tell_hidden(hidden, tokens.items())
            return logits[: len(ids)]

    def _prefill(self, slot: int, first: int, tokens: Sequence[int], keep: int | None) -> Tensor:
        size = self._steps.size_of_prompt(len(tokens)) if keep == 1 else None
        if size is not None:
            return self._prefill_as_step(slot, tokens, size)
        self.cache.begin(Segment(slot, first, len(tokens)))
        self._announce(tokens)
        ids = on_its_way(list(tokens), self._device).to(self._device, non_blocking=True)
        positions = torch.arange(first, first + len(tokens), device=self._device)
        with intercepted(Announced()), given_rows(self._prompt_rows.of_prompt(tokens)):
            logits = self._model.logits(ids[None], positions[None], keep)[0]
        self.cache.commit()
        return logits

    def _prefill_as_step(self, slot: int, tokens: Sequence[int], size: int) -> Tensor:
        """Append a prompt's tokens in a step padded to `size`; return the logits after the last."""
        self._steps.follow_executor()
        self.cache.begin_prompt_step(slot, len(tokens), size)
        self._steps.inputs_of(size).upload(tokens)
        self._announce(tokens)
        logits = self._steps.run(self._steps.at(size, of_prompt=True))
        self.cache.commit()
        return logits.clone()  # the next prompt of this size overwrites them

    def _announce(self, tokens: Sequence[int]) -> None:
        executor = self._model.executor
        self._token_routed.expect(tokens, executor)
        if executor is not None:
            executor.begin_step(tokens, is_prefill=len(tokens) > 1)

    def _decode(self, count: int) -> Tensor:
        self._last = self._steps.at(count)
        return self._steps.run(self._last)

    @torch.inference_mode()
    def launch_once(self, count: int) -> None:
        """Run the operations of a captured step of `count` tokens; capture and keep nothing.

        This compiles and loads its kernels; it does nothing if steps do not use Triton. Raises
        `NotRecordableError`, and errors of the kernels.
        """
        if self._launches_kernels:
            with _on(self._device):
                self._steps.launch_once(count)

    def _with_room(
        self, work: Callable[[], Tensor], slots: Sequence[int], *, can_repeat: bool = True
    ) -> Tensor:
        """Run `work`; if the GPU is out of memory, free memory as in `_make_room` and repeat it.

        The slots' states are saved first, unless `can_repeat` is false: states are too large to
        copy for each token of a replayed step. Raises `CapacityError` if the GPU is out of memory
        and either no more can be freed, or `can_repeat` is false.
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
            self._steps.follow_executor()  # what was captured may read slots that are gone

    def _make_room(self) -> bool:
        """Free captured prompts, or else a part of the expert cache; False if nothing was freed."""
        if self._steps.drop_prompts():
            return True
        executor = self._model.executor
        if not isinstance(executor, HybridExecutor) or executor.cache.num_slots == 0:
            return False
        executor.resize_now(int(executor.cache.num_slots * SHRINK))
        return True


def make_cuda_capture(model: PreTrainedModel) -> MakeCapture:
    """Return a function that returns a new capture on a model's GPU; all use one stream."""
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
    """Return a pool of slots on the model's GPU; its steps are captured only with `has_replay`."""
    make_capture = make_cuda_capture(model) if has_replay else None
    return CudaSlotPool(
        model, num_slots, capacity=capacity, make_capture=make_capture, kv_dtype=kv_dtype,
        notes_hidden=notes_hidden,
    )  # fmt: skip


def why_no_cuda_slots(model: PreTrainedModel) -> str | None:
    """Run a few tokens as a trial; return why `CudaSlotPool` cannot serve a model, or None.

    Raises `CapacityError` if the GPU has too little memory for the trial.
    """
    return why_other_logits(model, lambda num_slots: CudaSlotPool(model, num_slots))


def slot_bytes(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> int | None:
    """Return the bytes of a slot of `num_tokens` tokens, measured by running a prompt.

    None if slots cannot serve the model.
    """
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


def _nothing() -> None:
    pass


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that makes `device` torch's current GPU, on which kernels launch."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
