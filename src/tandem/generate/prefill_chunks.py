"""Chooses the prompt tokens of each step: the next tokens of one prompt or of several.

Where one forward can compute tokens of any slots, a chunk holds tokens of several prompts, and the
scheduler adds the next token of each stream, so that all of these tokens read the experts once.
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
_SHORTER_WITH_OTHERS = 4


class ChunkPart(NamedTuple):
    """The tokens of one prompt in a chunk: from `running.num_done` to `end`."""

    running: Running
    end: int
    """The number of prompt tokens done after this chunk."""


class PrefillChunks:
    """Cuts prompts into chunks; a chunk may hold parts of several prompts."""

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
        """Cut a model's prompts into chunks of at most `chunk_tokens` for the slots of `pool`.

        Prompts stay whole if the pool cannot prefill in chunks. See `Scheduler` for `pace` and
        `merges_prompts`.
        """
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
        """Return the next chunk, [] if no prompt may run now; add reused tokens to `counts`.

        `num_streams` is the number of requests that decode meanwhile.
        """
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
        """Return prompts by priority; within one priority, the order alternates between chunks.

        Every second chunk begins with the prompts that it can complete, fewest remaining tokens
        first. All other chunks serve prompts in turn, so that a long prompt is not overtaken for
        ever.
        """
        self._completes_first = not self._completes_first

        def rank(running: Running) -> tuple[int, int]:
            left = len(running.request.prompt) - running.num_done
            can_complete = self._completes_first and left <= size
            return running.request.priority, left if can_complete else size + 1

        return sorted(prompts, key=rank)

    def may_join(self, running: Running) -> bool:
        """Tell whether streams' tokens can join a prompt's forward with bit-identical results."""
        return self._may_merge(running) and self._is_shared_alike and self._pool.may_join_prefill()

    def _may_merge(self, running: Running) -> bool:
        """Tell whether a chunk may hold tokens of this prompt and of other prompts."""
        if running.is_alone or running.prompt_logprobs is not None:
            return False
        return self._merges_prompts or self._is_shared_alike

    def _may_prefill(self, num_streams: int) -> bool:
        """Tell whether a chunk may run now; if not, streams must get tokens first."""
        return self._pace is None or num_streams == 0 or self._pace.may_prefill

    def _size(self, num_streams: int) -> int:
        """Return the largest number of prompt tokens for the next chunk."""
        if num_streams == 0 or not self._is_alike_however_cut:
            return self._chunk_tokens
        if self._pace is not None:
            return self._pace.chunk_tokens(self._chunk_tokens)
        return max(1, self._chunk_tokens // _SHORTER_WITH_OTHERS)

    def _find(self, running: Running, counts: BatchCounts, *, is_alone: bool) -> bool:
        """Copy a prompt's next tokens from slots or disk; return whether it may now be computed.

        It must not be computed while segments on disk are unread. Unless `is_alone` (no other
        request waits for a token), only a few segments are read per step.
        """
        gained = self._prefixes.catch_up(running)
        if running.on_disk:
            gained += self._prefixes.read(running, is_alone=is_alone)
        running.reused_tokens += gained
        counts.reused_tokens += gained
        counts.read_tokens = self._prefixes.num_read_tokens
        return not running.on_disk
