"""Sequence slots on the CPU: one forward computes tokens of several slots as one sequence.

A step of n tokens is recorded once for each n (`tandem.recording.replay`); the tokens' slots are an
input of the recorded graph. Supported models call Transformers' attention functions, and their
layers keep keys and values, or states that Tandem's own operations advance
(`tandem.decode.substitutions.recurrences`). `why_no_cpu_slots` tests a model for this.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tandem.core.errors import ExecutionError
from tandem.decode.model_runner import ModelRunner, tolerance_of
from tandem.decode.moving import MovingSlots
from tandem.decode.slots import EACH_TOKEN_SEEN, CachedSlotPool
from tandem.decode.token_routed import TokenRouted
from tandem.decode.trial import why_other_logits
from tandem.experts.execution.executor import unheard
from tandem.foreign_types import PreTrainedModel
from tandem.hf.lookahead.over_disk import look_ahead_over_disk
from tandem.hf.lookahead.warm_up import warm_up_ids
from tandem.hf.steps import MAX_STEP_TOKENS
from tandem.kernels import _native
from tandem.kernels.attention import Segment
from tandem.kernels.dense import VALUE_DTYPES, CpuThreads
from tandem.kv_cache.cpu import KvCache
from tandem.kv_cache.prefix_files import SEGMENT_TOKENS
from tandem.recording.recorded_graph import RecordedGraph, record_step
from tandem.recording.replay import ReplayedStep

# Fused operations may differ in bf16's last digit, and near ties of a router may flip.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}


class _Step(NamedTuple):
    """A decode step of n tokens, with its input tensors `ids` (n, 1) and three more (n,)."""

    slots: Tensor
    """Each token's slot; a slot may have several consecutive tokens."""
    positions: Tensor
    """Each token's position in its slot."""
    rotary: Tensor
    """Each token's rotary position, which differs from its position after an image."""
    ids: Tensor
    hidden: Tensor | None
    """The output head's input, (n, width); None unless the pool was made with `notes_hidden`."""
    replayed: ReplayedStep


class CpuSlotPool(CachedSlotPool[KvCache]):
    """Computes the steps of several slots on the CPU, on a `KvCache`."""

    prefills_together = True

    def __init__(
        self,
        model: PreTrainedModel,
        threads: CpuThreads,
        num_slots: int,
        *,
        capacity: int = 0,
        has_replay: bool = True,
        kv_dtype: str = "auto",
        notes_hidden: bool = False,
        inputs: Callable[[int], list[Tensor]] = lambda _: [],
    ) -> None:
        """Make `num_slots` slots with room for `capacity` tokens each; slots grow as needed.

        Without `has_replay` the model's own code runs every step. `kv_dtype` is as in `KvCache`.
        With `notes_hidden`, `hidden` and `on_hidden` report the output head's input. `inputs(n)`
        returns additional tensors that a decode step of n tokens reads.
        """
        cache = KvCache(threads, num_slots, max(1, capacity), kv_dtype=kv_dtype)
        super().__init__(ModelRunner(model, cache, threads, notes_hidden=notes_hidden), cache)
        self._inputs = inputs
        self._has_replay = has_replay
        self._is_packed = not any(isinstance(one, nn.Linear) for one in model.modules())
        self._executor = self._model.executor
        self._token_routed = TokenRouted(model)
        self._steps: dict[int, _Step] = {}
        self._last: _Step | None = None
        self._joins: bool | None = None  # whether decoded tokens may join a prefill, if tried
        self._is_to_try_joining = False

    @property
    def step(self) -> ReplayedStep:
        """The latest decode step; before the first one, a step of one token in each slot."""
        return (self._last or self._step_of(self.num_slots)).replayed

    @torch.inference_mode()
    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> Tensor:
        """Append tokens to some slots; return the logits after each slot's last token.

        The logits are (slots, vocabulary). With packed layers they depend on the slot's tokens
        alone, not on how the tokens are split into calls.
        """
        found: dict[int, Tensor] = {}
        for chunk in self._chunks(prompts):
            lasts = torch.tensor([len(tokens) for _, tokens in chunk], device="cpu").cumsum(0) - 1
            logits = self._forward(chunk, lasts)
            logits = logits if self._model.keeps_logits else logits[lasts]
            found |= zip((slot for slot, _ in chunk), logits, strict=True)
        stacked = torch.stack([found[slot] for slot in prompts])
        self._require_finite(list(prompts), stacked)
        return stacked

    def _prefill_all(self, slot: int, tokens: Sequence[int]) -> Tensor:
        return self._forward([(slot, tokens)], None)

    @property
    def why_no_drafts(self) -> str | None:
        """Why `verify` must get only one token per slot, as one sentence.

        None if `verify` accepts several tokens per slot, which `keep` can remove again.
        """
        executor = self._model.executor
        if executor is not None and not executor.takes_drafts:
            return EACH_TOKEN_SEEN
        if self._is_packed or self._steps_are_native():
            return None
        return "linear layers are not packed (--dense-dtype), so that an answer might change"

    def _steps_are_native(self) -> bool:
        """Tell whether each settled step is a recorded graph without matrix products in torch.

        Such steps are batch-invariant. Returns False if no step is settled
        (`ReplayedStep.has_settled`).
        """
        settled = [s.replayed for s in self._steps.values() if s.replayed.has_settled]
        graphs = [replayed.recording for replayed in settled]
        return bool(graphs) and all(
            isinstance(graph, RecordedGraph) and not graph.has_torch_products for graph in graphs
        )

    @torch.inference_mode()
    def verify(self, tokens: Mapping[int, Sequence[int]]) -> Tensor:
        """Append tokens to slots in one decode step; return the logits after each token.

        The logits are (n_tokens, vocabulary), slot by slot. The step is recorded once for each
        number of tokens.
        """
        self._follow_executor()
        slots = [slot for slot, new in tokens.items() for _ in new]
        ids = [token for new in tokens.values() for token in new]
        step = self._last = self._step_of(len(ids))
        joined = self._try_joining(tokens) if self._is_to_try_joining else None
        counts = {slot: len(new) for slot, new in tokens.items()}
        self.cache.begin_decode(counts, step.slots, step.positions)
        step.rotary.copy_(step.positions)
        deltas = self._images.deltas(slots)
        if deltas is not None:
            step.rotary.add_(torch.tensor(deltas, device="cpu"))
        step.ids.copy_(torch.tensor(ids, device="cpu")[:, None])
        executor = self._executor
        self._token_routed.expect(ids, executor)
        if step.replayed.is_replaying and executor is not None and executor.needs_steps:
            executor.begin_step(ids, is_prefill=False)
        with self._going_back(slots):
            try:
                logits = step.replayed()
            except _native.StepLostError as error:
                raise ExecutionError(
                    f"a decode step was lost ({error}); the request is lost, the model can be "
                    "used again"
                ) from error
            self.cache.commit()
        for slot, new in tokens.items():
            self._held[slot] += new
        self._require_finite(slots, logits)
        self._tell_hidden(step.hidden, tokens.items())
        if joined is not None:
            self._joins = torch.equal(joined, logits)
        return logits

    def may_join_prefill(self) -> bool:
        """Tell whether `prefill` computes the same logits for a decoded token as a decode step.

        False until a trial in a later `verify` has shown that they are exactly equal. Always False
        if the KV cache has `prompt_windows`, because `prefill` would make the decoded token a part
        of the prompt. The trial fails for a model that expands latents in prompts but not in decode
        steps.
        """
        if self.cache.prompt_windows:
            self._joins = False
        self._is_to_try_joining = self._joins is None
        return bool(self._joins)

    def _try_joining(self, tokens: Mapping[int, Sequence[int]]) -> Tensor | None:
        """Compute a decode step's tokens by `prefill`, remove them again, and return the logits.

        None, and nothing is run, if the step is not settled (`ReplayedStep.has_settled`) or a slot
        has several tokens.
        """
        step = self._step_of(sum(map(len, tokens.values()))).replayed
        if not step.has_settled or any(len(new) > 1 for new in tokens.values()):
            return None
        self._is_to_try_joining = False
        on_hidden, self.on_hidden = self.on_hidden, None
        try:
            with unheard(self._executor), self.on_trial([*tokens]):
                return self.prefill(tokens)
        finally:
            self.on_hidden = on_hidden

    @property
    def moving(self) -> MovingSlots | None:
        """The object that copies contents of slots out as bytes, and back into slots.

        None before the first prompt, and if segments of `SEGMENT_TOKENS` tokens do not fill whole
        blocks in every layer.
        """
        if not self.cache.can_move(SEGMENT_TOKENS):
            return None
        return MovingSlots(self.cache, self._held)

    def record_ahead(self, *, has_passed: bool) -> bool:
        """Record the step of one token before the first prompt; return whether it is replayed.

        `has_passed` says that in an earlier process the recorded step has matched the model's own
        code. The slots must be empty, and are empty afterwards. With an executor that plans, this
        does nothing and returns False, because the executor would learn from the step.
        """
        executor = self._model.executor
        if executor is not None and executor.needs_steps:
            return False
        first, second = warm_up_ids(self._model.model, 2).tolist()
        step = self._step_of(1).replayed
        if has_passed:
            step.trust_sooner()
        with unheard(executor):
            self.prefill({0: [first]})
            while not step.is_replaying and step.why_not is None:
                self.decode({0: second})
        self.keep(0, 0)
        return step.is_replaying

    def _chunks(
        self, prompts: Mapping[int, Sequence[int]]
    ) -> Iterator[list[tuple[int, Sequence[int]]]]:
        """Split prompts into forwards of at most `MAX_STEP_TOKENS` tokens.

        Yields the pairs of slot and tokens of each forward.
        """
        chunk: list[tuple[int, Sequence[int]]] = []
        room = MAX_STEP_TOKENS
        for slot, tokens in prompts.items():
            first = 0
            while first < len(tokens):
                part = tokens[first : first + room]
                chunk.append((slot, part))
                first, room = first + len(part), room - len(part)
                if room == 0:
                    yield chunk
                    chunk, room = [], MAX_STEP_TOKENS
        if chunk:
            yield chunk

    def _forward(self, chunk: list[tuple[int, Sequence[int]]], keep: Tensor | None) -> Tensor:
        """Append a chunk's tokens to their slots; return the logits after the tokens in `keep`.

        `keep` has indices of the chunk's tokens. If `keep` is None, or the model cannot select
        logits, the result has the logits after all tokens.
        """
        self._follow_executor()
        lengths = self.cache.lengths
        segments = [Segment(slot, lengths[slot], len(tokens)) for slot, tokens in chunk]
        self.cache.begin(segments)
        keys = torch.tensor([token for _, tokens in chunk for token in tokens], device="cpu")
        with self._going_back([slot for slot, _ in chunk]):
            ids, positions, features = self._images.place(segments, keys, self.cache.positions)
            self._token_routed.expect(ids.tolist(), self._executor)
            logits = self._model.logits(ids[None], positions, keep, features, is_prompt=True)
            self.cache.commit()
        for slot, tokens in chunk:
            self._held[slot] += tokens
        hidden = self._model.hidden
        self._tell_hidden(None if hidden is None else hidden[0], chunk)
        return logits[0]

    @contextmanager
    def on_trial(self, slots: Sequence[int]) -> Iterator[None]:
        """Remove the few tokens that the `with` body appends to `slots`, when the body ends."""
        lengths = {slot: self.cache.lengths[slot] for slot in slots}
        with torch.inference_mode():
            put_back = self.cache.states.save(slots)
        try:
            yield
        finally:
            with torch.inference_mode():
                put_back()
            for slot, length in lengths.items():
                self.cache.lengths[slot] = length
                del self._held[slot][length:]

    def _step_of(self, num_tokens: int) -> _Step:
        if num_tokens not in self._steps:
            self._steps[num_tokens] = self._new_step(num_tokens)
        return self._steps[num_tokens]

    def _new_step(self, num_tokens: int) -> _Step:
        if self._has_replay:
            look_ahead_over_disk(self._model.model)
        with torch.inference_mode(False):
            slots, positions, rotary = (
                torch.zeros(num_tokens, dtype=torch.int64, device="cpu") for _ in range(3)
            )
            ids = torch.zeros((num_tokens, 1), dtype=torch.int64, device="cpu")
            hidden = self._model.room_for_hidden(num_tokens)

        def run() -> Tensor:
            logits = self._model.logits(ids, rotary[:, None])[:, -1]
            if hidden is not None and self._model.hidden is not None:
                hidden.copy_(self._model.hidden[:, -1])
            return logits

        inputs = [ids, positions, rotary, *self._inputs(num_tokens)]
        replayed = ReplayedStep(
            run,
            partial(record_step, run, inputs, self.cache.threads),
            tolerance_of(self._model.model, _TOLERANCES),
            executor=self._executor,
            announce=partial(self._announce_again, num_tokens),
            save=lambda: self.cache.states.save(slots.tolist()),
            is_like_trusted=any(s.replayed.is_replaying for s in self._steps.values()),
            why_not=self._model.why_not_replayed(_TOLERANCES, has_replay=self._has_replay),
        )
        return _Step(slots, positions, rotary, ids, hidden, replayed)

    def _announce_again(self, num_tokens: int) -> None:
        if self._executor is not None:
            self._executor.repeat_step(num_tokens)

    def _follow_executor(self) -> None:
        """Drop all recorded steps if the model's executor has been replaced."""
        executor = self._model.executor
        if executor is not self._executor:
            self._executor, self._last, self._joins = executor, None, None
            self._steps.clear()


def why_no_cpu_slots(model: PreTrainedModel, threads: CpuThreads) -> str | None:
    """Run a few tokens as a trial; return why `CpuSlotPool` cannot serve a model, or None."""
    if model.device.type != "cpu" or model.dtype not in VALUE_DTYPES:
        return f"the model is {model.dtype} on {model.device.type}"
    return why_other_logits(
        model, lambda num_slots: CpuSlotPool(model, threads, num_slots, has_replay=False)
    )
