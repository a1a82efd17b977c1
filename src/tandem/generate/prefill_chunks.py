"""Chooses what is prefilled in a step: the next tokens of one prompt or of several.

Where one forward computes tokens of any slots, a chunk holds those of several prompts, and the
scheduler adds the next token of each stream, so that all of them read the experts once.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from tandem.decode.slots import SlotPool
from tandem.foreign_types import PreTrainedModel
from tandem.generate.held_prefixes import HeldPrefixes
from tandem.generate.pace import Pace
from tandem.generate.running import Running
from tandem.generate.token_output import BatchCounts

# Running streams wait for each chunk, but shorter chunks read the experts more often.
CHUNK_TOKENS = 256
# While other requests are answered, chunks are shorter by this factor. The others wait less, and
# the prompt takes longer.
_SHORTER_BESIDE_OTHERS = 4


class ChunkPart(NamedTuple):
    """A request's tokens in a chunk."""

    running: Running
    end: int
    """The number of prompt tokens done after this chunk."""


class PrefillChunks:
    """Cuts prompts into chunks, and puts several into one."""

    def __init__(
        self,
        model: PreTrainedModel,
        pool: SlotPool,
        prefixes: HeldPrefixes,
        pace: Pace | None,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        merges_prompts: bool = False,
    ) -> None:
        """Cut a model's prompts for a pool; the arguments are those of `Scheduler`."""
        self._pool, self._prefixes, self._pace = pool, prefixes, pace
        self._chunk_tokens = chunk_tokens if pool.can_prefill_in_chunks else 1 << 62
        self._merges_prompts = merges_prompts
        self._completes_first = False
        self._is_alike_however_cut = pool.can_prefill_in_chunks and not any(
            isinstance(module, nn.Linear) for module in model.modules()
        )
        self._is_shared_alike = pool.prefills_together and self._is_alike_however_cut

    def next(
        self, prompts: Sequence[Running], counts: BatchCounts, *, num_streams: int
    ) -> list[ChunkPart]:
        """Return the next chunk beside this many streams; count tokens that need no computing."""
        if not prompts or not self._may_prefill(num_streams):
            return []
        size = self._size(num_streams)
        chunk: list[ChunkPart] = []
        for running in self._in_order(prompts, size):
            is_alone = not self._may_merge(running)
            if chunk and (size <= 0 or is_alone):
                break
            if any(self._prefixes.will_gain(running, part.running) for part in chunk):
                continue
            has_slots = len(prompts) + num_streams == 1  # no other request waits for a token
            if not self._find(running, counts, is_alone=has_slots):
                continue
            first = running.num_done
            # If layers are not packed, chunks end at fixed positions, because the length of a chunk
            # decides the last bits.
            is_free = chunk or (self._is_alike_however_cut and self._pace is not None)
            end = first + size if is_free else (first // size + 1) * size
            end = min(len(running.request.prompt), end)
            chunk.append(ChunkPart(running, end))
            size -= end - first
            if is_alone:
                break
        return chunk

    def _in_order(self, prompts: Sequence[Running], size: int) -> list[Running]:
        """Return prompts by priority, then in every second chunk those it can complete first.

        The fewest remaining tokens come first among them. The other chunks serve prompts in turn,
        so that a long prompt is not overtaken for ever.
        """
        self._completes_first = not self._completes_first

        def rank(running: Running) -> tuple[int, int]:
            left = len(running.request.prompt) - running.num_done
            can_complete = self._completes_first and left <= size
            return running.request.priority, left if can_complete else size + 1

        return sorted(prompts, key=rank)

    def may_join(self, running: Running) -> bool:
        """Whether a prompt's forward may compute streams' tokens, to the same bits."""
        return self._may_merge(running) and self._is_shared_alike and self._pool.may_join_prefill()

    def _may_merge(self, running: Running) -> bool:
        """Whether a chunk may hold other prompts' tokens beside this one's."""
        if running.is_alone or running.prompt_logprobs is not None:
            return False
        return self._merges_prompts or self._is_shared_alike

    def _may_prefill(self, num_streams: int) -> bool:
        """Whether it is a prompt's turn."""
        return self._pace is None or num_streams == 0 or self._pace.may_prefill

    def _size(self, num_streams: int) -> int:
        """Return how many prompt tokens are computed now."""
        if num_streams == 0 or not self._is_alike_however_cut:
            return self._chunk_tokens
        if self._pace is not None:
            return self._pace.chunk_tokens(self._chunk_tokens)
        return max(1, self._chunk_tokens // _SHORTER_BESIDE_OTHERS)

    def _find(self, running: Running, counts: BatchCounts, *, is_alone: bool) -> bool:
        """Use what other slots and the disk have of a prompt; return whether to go on computing.

        If others wait for their tokens, the next step reads the rest from disk.
        """
        gained = self._prefixes.catch_up(running)
        if running.on_disk:
            gained += self._prefixes.read(running, is_alone=is_alone)
        running.reused_tokens += gained
        counts.reused_tokens += gained
        counts.read_tokens = self._prefixes.num_read_tokens
        return not running.on_disk
