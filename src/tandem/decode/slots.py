"""Sequence slots: each holds the keys and values of one sequence, which requests take and leave.

`SlotPool` is what the scheduler drives. What a slot held stays until another request takes it, so
that the next turn of a conversation finds its beginning there.
"""

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

# Called with a slot, the position of its first new token, and what the head read of these.
OnHidden = Callable[[int, int, Tensor], None]

# Why nothing is drafted beside executors that pass calls on.
EACH_TOKEN_SEEN = "what records or forces routing sees one token of each sequence in a step"


class SlotPool(ABC):
    """What a scheduler needs of a model whose requests come and go; here slots hold nothing."""

    num_slots: int
    can_prefill_in_chunks = False

    @property
    def num_bytes(self) -> int | None:
        """Bytes that the KV cache takes now; None where it is not ours to count."""
        return None

    @property
    def step(self) -> ReplayedStep | None:
        """The decode step that was done last, or else that of all slots; None: never replayed."""
        return None

    @property
    def moving(self) -> MovingSlots | None:
        """What takes out of slots what they keep of tokens, and puts it in; not before a prompt.

        None: it stays where it is.
        """
        return None

    @property
    @abstractmethod
    def why_no_drafts(self) -> str | None:
        """Why `verify` takes one token of a slot; None: it takes several, which may be taken back.

        One sentence.
        """

    def held(self, slot: int) -> Sequence[int]:
        """Return the tokens whose keys and values a slot holds."""
        return ()

    def usable(self, slot: int, length: int) -> int:
        """Return with how many of the first `length` tokens that it holds a slot can go on."""
        return 0

    def keep(self, slot: int, length: int) -> None:  # noqa: B027 - nothing is held
        """Let a slot forget what it holds beyond `length` tokens, which are usable."""

    def copy(self, source: int, target: int, length: int) -> None:  # noqa: B027 - nothing is held
        """Let `target` hold the first tokens that `source` holds, which are usable."""

    @abstractmethod
    def show(self, slot: int, images: ImagePrompt | None) -> None:
        """Say which images the tokens that a slot gets next are of, before a prompt begins.

        The tokens are then the prompt's keys. Raises `UnsupportedModelError`.
        """

    @abstractmethod
    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> Tensor:
        """Append tokens to some slots; return the logits after each: (slots, vocabulary)."""

    @abstractmethod
    def prefill_with_logits(self, slot: int, tokens: Sequence[int]) -> Tensor:
        """Append tokens to a slot; return the logits after each token: (n_tokens, vocabulary)."""

    @abstractmethod
    def verify(self, tokens: Mapping[int, Sequence[int]]) -> Tensor:
        """Append tokens to slots in one decode step; return the logits after each token.

        They are (n_tokens, vocabulary), slot by slot, and valid until the next call.
        """

    def decode(self, tokens: Mapping[int, int]) -> Tensor:
        """Append one token to each of some slots; return (slots, vocabulary) in their order."""
        return self.verify({slot: (token,) for slot, token in tokens.items()})


class CachedSlotPool(SlotPool, Generic[_Cache]):
    """Keeps the books of slots on a KV cache of Tandem's. One call at a time."""

    can_prefill_in_chunks = True

    def __init__(self, runner: ModelRunner, cache: _Cache) -> None:
        """Take a model's runner and its cache, which holds nothing."""
        self.cache = cache
        self.num_slots = len(cache.lengths)
        self._model = runner
        self._held: list[list[int]] = [[] for _ in range(self.num_slots)]
        self._images = SlotImages(runner.model)
        self.hidden: Tensor | None = None
        """What the output head read of the latest forward's tokens, (n_tokens, width)."""
        self.on_hidden: OnHidden | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that the KV cache takes now: room for the longest slot so far, for every slot."""
        return self.cache.num_bytes

    @property
    @abstractmethod
    def step(self) -> ReplayedStep:
        """The decode step that was done last, or else that of all slots."""

    def held(self, slot: int) -> Sequence[int]:
        """Return the tokens whose keys and values a slot holds."""
        return self._held[slot]

    def usable(self, slot: int, length: int) -> int:
        """Return with how many of the first `length` tokens that it holds a slot can go on."""
        return self.cache.usable(slot, length)

    def keep(self, slot: int, length: int) -> None:
        """Let a slot forget what it holds beyond `length` tokens, which are usable."""
        self.cache.truncate(slot, length)
        del self._held[slot][length:]

    def copy(self, source: int, target: int, length: int) -> None:
        """Let `target` hold the first tokens that `source` holds, and nothing else."""
        self.cache.copy_prefix(source, target, length)
        self._held[target] = self._held[source][:length]

    def show(self, slot: int, images: ImagePrompt | None) -> None:
        """Say which images the tokens that a slot gets next are of, before a prompt begins."""
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
        """Append tokens to a slot; return the logits after each, unchecked."""

    def pretend(self, depth: int, room: int) -> None:
        """Let every slot hold `depth` invented tokens, with room for more; to time a step.

        Needs a prompt before it, which makes the KV cache's layers.
        """
        self.cache.reserve(depth + room)
        self.cache.pretend(depth)
        self._held = [[-1] * depth for _ in self._held]

    def _tell_hidden(
        self, hidden: Tensor | None, tokens: Iterable[tuple[int, Sequence[int]]]
    ) -> None:
        """Tell what the head read of tokens that slots hold now: (n_tokens, width)."""
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
        """Let slots with states go back to a checkpoint if a step breaks off."""
        try:
            yield
        except BaseException:
            if self.cache.states:
                for slot in slots:
                    self.keep(slot, self.usable(slot, max(0, self.cache.lengths[slot] - 1)))
            raise

    def _require_finite(self, slots: Sequence[int], logits: Tensor) -> None:
        """Raise `ExecutionError` for logits (slots, vocabulary) that are not; forget the slots."""
        try:
            require_finite_logits(
                self._model.model, logits, lambda i: self._images.ids(self._held[slots[i]])
            )
        except ExecutionError:
            for slot in slots:
                self.keep(slot, 0)
            raise


def num_shared(held: Sequence[int], prompt: Sequence[int]) -> int:
    """Count the tokens that both begin with, but for the prompt's last: its logits are needed."""
    most = min(len(held), len(prompt) - 1)
    return next((i for i in range(most) if held[i] != prompt[i]), most)
