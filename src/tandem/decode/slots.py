"""Sequence slots: each holds one sequence's keys and values, and requests take and release them.

The scheduler drives a `SlotPool`. A slot keeps its contents until another request uses the slot, so
that the next turn of a conversation finds its prefix there.
"""

import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor

from tandem.core.errors import ExecutionError, UnsupportedModelError
from tandem.decode.finite_logits import require_finite_logits
from tandem.decode.images import ImagePrompt, SlotImages, why_no_slot_images
from tandem.decode.model_runner import ModelRunner
from tandem.decode.moving import MovingSlots
from tandem.kv_cache.base import SlotCache
from tandem.recording.replay import ReplayedStep

_Cache = TypeVar("_Cache", bound=SlotCache)

# Called with a slot, the position of its first new token, and the head's inputs for the new tokens.
OnHidden = Callable[[int, int, Tensor], None]

# Why nothing is drafted while an executor passes calls on.
EACH_TOKEN_SEEN = "what records or forces routing sees one token of each sequence in a step"


class SlotPool(ABC):
    """The interface through which a scheduler runs a model.

    In this base class, slots keep nothing between requests.
    """

    num_slots: int
    can_prefill_in_chunks = False
    prefills_together = False
    """Whether `prefill` computes the tokens of several slots in one forward."""

    @property
    def num_bytes(self) -> int | None:
        """The KV cache's current size in bytes; None if the KV cache is not Tandem's."""
        return None

    @property
    def step(self) -> ReplayedStep | None:
        """The latest decode step; before the first one, a step of one token in each slot.

        None if steps are never replayed.
        """
        return None

    @property
    def moving(self) -> MovingSlots | None:
        """The object that copies contents of slots out as bytes, and back into slots.

        None before the first prompt, and if the contents cannot be moved.
        """
        return None

    @property
    @abstractmethod
    def why_no_drafts(self) -> str | None:
        """Why `verify` must get only one token per slot, as one sentence.

        None if `verify` accepts several tokens per slot, which `keep` can remove again.
        """

    def held(self, slot: int) -> Sequence[int]:
        """Return the tokens whose keys and values a slot holds."""
        return ()

    def usable(self, slot: int, length: int) -> int:
        """Return how many of the slot's first `length` tokens a request can reuse."""
        return 0

    def keep(self, slot: int, length: int) -> None:  # noqa: B027 - nothing is held
        """Discard a slot's contents after its first `length` tokens.

        `length` must be a result of `usable`, unless only the last `verify`'s tokens are discarded.
        """

    def copy(self, source: int, target: int, length: int) -> None:  # noqa: B027 - nothing is held
        """Replace the contents of slot `target` by the first `length` tokens of slot `source`.

        `length` must be a result of `usable` for `source`.
        """

    @abstractmethod
    def show(self, slot: int, images: ImagePrompt | None) -> None:
        """Set the images of the slot's next prompt; None: it has no images.

        Must be called before the first token of that prompt is appended. The prompt's tokens must
        then be `images.keys`. Raises `UnsupportedModelError` if the slots cannot hold images.
        """

    @abstractmethod
    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> Tensor:
        """Append tokens to some slots; return the logits after each slot's last token.

        The logits are (slots, vocabulary), in the order of `prompts`.
        """

    @abstractmethod
    def prefill_with_logits(self, slot: int, tokens: Sequence[int]) -> Tensor:
        """Append tokens to a slot; return the logits after each token: (n_tokens, vocabulary)."""

    @abstractmethod
    def verify(self, tokens: Mapping[int, Sequence[int]]) -> Tensor:
        """Append tokens to slots in one decode step; return the logits after each token.

        The logits are (n_tokens, vocabulary), slot by slot, and valid until the next call.
        """

    def may_join_prefill(self) -> bool:
        """Tell whether `prefill` computes the same logits for a decoded token as a decode step.

        False until a trial has shown that they are exactly equal. The first call requests the
        trial, in which the next decode step is computed in both ways.
        """
        return False

    def decode(self, tokens: Mapping[int, int]) -> Tensor:
        """Append one token to each given slot; return the logits after it, (slots, vocabulary)."""
        return self.verify({slot: (token,) for slot, token in tokens.items()})


class CachedSlotPool(SlotPool, Generic[_Cache]):
    """Base class of pools on Tandem's KV caches: notes the tokens in each slot. Not thread-safe."""

    can_prefill_in_chunks = True

    def __init__(self, runner: ModelRunner, cache: _Cache) -> None:
        """Take a model's runner and the empty KV cache on which it runs."""
        self.cache = cache
        self.num_slots = len(cache.lengths)
        self._model = runner
        self._held: list[list[int]] = [[] for _ in range(self.num_slots)]
        self._images = SlotImages(runner.model)
        self.hidden: Tensor | None = None
        """The output head's input for the latest forward's tokens, (n_tokens, width).

        None before the first forward, and always if `runner` was made without `notes_hidden`.
        """
        self.on_hidden: OnHidden | None = None

    @property
    def num_bytes(self) -> int:
        """The KV cache's current size in bytes.

        Each slot has room for the longest sequence so far.
        """
        return self.cache.num_bytes

    @property
    @abstractmethod
    def step(self) -> ReplayedStep:
        """The latest decode step; before the first one, a step of one token in each slot."""

    def held(self, slot: int) -> Sequence[int]:
        """Return the tokens whose keys and values a slot holds."""
        return self._held[slot]

    def usable(self, slot: int, length: int) -> int:
        """Return how many of the slot's first `length` tokens a request can reuse."""
        return self.cache.usable(slot, length)

    def keep(self, slot: int, length: int) -> None:
        """Discard a slot's contents after its first `length` tokens.

        `length` must be `reachable` in the KV cache.
        """
        self.cache.truncate(slot, length)
        del self._held[slot][length:]

    def copy(self, source: int, target: int, length: int) -> None:
        """Replace the contents of slot `target` by the first `length` tokens of slot `source`.

        `length` must be `reachable` in `source`.
        """
        self.cache.copy_prefix(source, target, length)
        self._held[target] = self._held[source][:length]

    def show(self, slot: int, images: ImagePrompt | None) -> None:
        """Set the images of the slot's next prompt; None: it has no images."""
        if images is not None:
            why = why_no_slot_images(self._model.model)
            if why is not None:
                raise UnsupportedModelError(
                    f"{type(self._model.model).__name__} takes no images here: {why}; call "
                    "model.generate(...), or Generator.generate with one prompt"
                )
        self._images.show(slot, images)

    @torch.inference_mode()
    def prefill_with_logits(self, slot: int, tokens: Sequence[int]) -> Tensor:
        """Append tokens to a slot; return the logits after each token: (n_tokens, vocabulary)."""
        logits = self._prefill_all(slot, tokens)
        self._require_finite([slot], logits[-1:])
        return logits

    @abstractmethod
    def _prefill_all(self, slot: int, tokens: Sequence[int]) -> Tensor:
        """Append tokens to a slot; return the logits after each token, not checked for NaN."""

    def pretend(self, depth: int, room: int) -> None:
        """Fill every slot with `depth` made-up tokens and make room for `room` more, to time steps.

        A prompt must have run before, because it creates the KV cache's layers.
        """
        self.cache.reserve(depth + room)
        self.cache.pretend(depth)
        self._held = [[-1] * depth for _ in self._held]

    def _tell_hidden(
        self, hidden: Tensor | None, tokens: Iterable[tuple[int, Sequence[int]]]
    ) -> None:
        """Set `self.hidden` to the output head's input; pass each slot's rows to `on_hidden`.

        `tokens` has each slot with its new tokens, in the order of the rows of `hidden`.
        """
        self.hidden = hidden
        if hidden is None or self.on_hidden is None:
            return
        at = 0
        for slot, new in tokens:
            first = self.cache.lengths[slot] - len(new)
            self.on_hidden(slot, first, hidden[at : at + len(new)])
            at += len(new)

    @contextmanager
    def _going_back(self, slots: Sequence[int]) -> Iterator[None]:
        """If the `with` body raises and the model has states, cut `slots` back to checkpoints.

        A slot keeps the tokens up to its last checkpoint of the states.
        """
        try:
            yield
        except BaseException:
            if self.cache.states:
                for slot in slots:
                    self.keep(slot, self.usable(slot, max(0, self.cache.lengths[slot] - 1)))
            raise

    def _require_finite(self, slots: Sequence[int], logits: Tensor) -> None:
        """Raise `ExecutionError` if `logits` (slots, vocabulary) hold NaN or plus infinity.

        Row i belongs to `slots[i]`. All of `slots` are emptied before the error is raised.
        """
        try:
            require_finite_logits(
                self._model.model, logits, lambda i: self._images.ids(self._held[slots[i]])
            )
        except ExecutionError:
            for slot in slots:
                self.keep(slot, 0)
            raise


def num_shared(held: Sequence[int], prompt: Sequence[int]) -> int:
    """Return the length of the common prefix of `held` and `prompt`, at most len(prompt) - 1.

    The prompt's last token must always be computed, because the logits after it are needed.
    """
    most = min(len(held), len(prompt) - 1)
    differ = map(operator.ne, held, itertools.islice(prompt, most))
    return next(itertools.compress(itertools.count(), differ), most)
