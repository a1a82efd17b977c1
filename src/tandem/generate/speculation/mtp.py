"""Drafts with a model's own MTP layers; the first layer reads the input of the model's output head.

Layer i drafts the token i + 1 places after the sequence's last token, as Transformers' `MtpModel`
does. Further tokens are drafted by the last layer, each from its output for the token before.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise

from torch import Tensor

from tandem.decode.cpu_slots import CpuSlotPool
from tandem.decode.slots import CachedSlotPool, SlotPool
from tandem.generate.speculation.draft_model import DraftModel, Guess
from tandem.generate.speculation.mtp_layer import PROMPT_TOKENS, MtpLayer


class MtpDrafter(DraftModel):
    """Drafts one token with each MTP layer in order, and all further tokens with the last layer."""

    needs_hidden = True

    def __init__(self, layers: Sequence[MtpLayer], num_tokens: int) -> None:
        """Take the layers, in order of depth; drafted ids will be below `num_tokens`."""
        super().__init__(layers[0].slots, num_tokens)
        self._layers = layers
        for layer, after in pairwise(layers):
            layer.after = after
        self._sequences: Mapping[int, Sequence[int]] = {}
        self._trials = ExitStack()

    def follow(self, main: SlotPool) -> None:
        """Record from now on the hidden states of the tokens that the main model's slots read."""
        if main is not self._main:
            for layer in self._layers:
                layer.forget()
        super().follow(main)
        if isinstance(main, CachedSlotPool):  # other pools verify no drafts
            main.on_hidden = self._note

    def _note(self, slot: int, first: int, hidden: Tensor) -> None:
        """Record the output head's inputs `hidden` for a slot's tokens from position `first` on.

        With more than `PROMPT_TOKENS` tokens, all MTP layers read their pairs immediately.
        """
        self._layers[0].note(slot, first, hidden)
        if len(hidden) > PROMPT_TOKENS and self._main is not None:
            for layer in self._layers:
                self._read_certain(layer, {slot: self._main.held(slot)})

    def _catch_up(
        self, pool: CpuSlotPool, histories: Mapping[int, Sequence[int]]
    ) -> dict[int, Guess]:
        self._sequences = histories
        guesses = self._read_certain(self._layers[0], histories)
        for layer in self._layers[1:]:
            self._read_certain(
                layer,
                {
                    slot: tokens
                    for slot, tokens in histories.items()
                    if layer.num_waiting(slot) > PROMPT_TOKENS
                },
            )
        return guesses

    def _read_certain(
        self, layer: MtpLayer, sequences: Mapping[int, Sequence[int]]
    ) -> dict[int, Guess]:
        assert self._main is not None
        layer.slots(self._main.num_slots)
        return layer.read_certain({n: x for n, x in sequences.items() if layer.knows(n)})

    @contextmanager
    def _writing_on(self, pool: CpuSlotPool, slots: Sequence[int]) -> Iterator[None]:
        with ExitStack() as self._trials, super()._writing_on(pool, slots):
            yield

    def _written_on(
        self, pool: CpuSlotPool, drafts: Mapping[int, Sequence[Guess]]
    ) -> dict[int, Guess]:
        drafted = {slot: [guess.token for guess in guesses] for slot, guesses in drafts.items()}
        depth = min(map(len, drafted.values()))  # all have the same number
        if depth >= len(self._layers):
            return self._layers[-1].write_on({slot: new[-1] for slot, new in drafted.items()})
        layer = self._layers[depth]
        self._read_certain(layer, {slot: self._sequences[slot] for slot in drafted})
        drafted = {n: new for n, new in drafted.items() if layer.num_waiting(n)}
        assert self._main is not None
        self._trials.enter_context(layer.slots(self._main.num_slots).on_trial(list(drafted)))
        return layer.read_tried(drafted, self._layers[depth - 1])
