"""Finds prefixes of prompts that need not be computed, in sequence slots and on disk.

A slot keeps the keys and values of its request until another request takes the slot. With
`PrefixFiles`, whole segments are also written to disk, between steps. A prompt can then reuse
prefixes that no slot holds any more, even after a restart.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from tandem.decode.moving import MovingSlots
from tandem.decode.slots import SlotPool, num_shared
from tandem.generate.request import Request
from tandem.generate.running import Running
from tandem.kv_cache.prefix_files import SEGMENT_TOKENS, SEGMENTS_BETWEEN_STATES, PrefixFiles

# Segments read per step while other requests wait for tokens.
_READ_WITH_OTHERS = 4
_PAUSE_SECONDS = 0.01
# A prompt waits a step for the beginning of another one if that saves it more than 1 / _MUCH of its
# remaining tokens.
_MUCH = 4


class _Disk(NamedTuple):
    """The prefix files, and the object that moves slots' contents to files and back."""

    files: PrefixFiles
    slots: MovingSlots


class HeldPrefixes:
    """Finds, copies and stores prefixes in the slots of a pool and on disk. Not thread-safe."""

    def __init__(self, pool: SlotPool, files: PrefixFiles | None = None) -> None:
        """Use the slots of `pool`, which only one scheduler may change, and `files`, if given."""
        self._pool = pool
        moving = None if files is None else pool.moving
        self._disk = None if files is None or moving is None else _Disk(files, moving)
        self._keys: list[list[bytes]] = [[] for _ in range(pool.num_slots)]
        self._num_written = [0] * pool.num_slots
        self._owners = [b""] * pool.num_slots
        self.num_read_tokens = 0
        """Tokens whose keys and values were read from disk."""

    def take(self, request: Request, free: Sequence[int], oldest: int) -> tuple[int, int]:
        """Choose a free slot; return it and the number of prompt tokens that it then holds.

        Of the slots in `free`, `oldest` must have been free for longest. The free slot with the
        longest usable prefix of the prompt is chosen if this prefix is at least half of the slot's
        contents. Otherwise `oldest` is chosen; if another slot, even a busy one, has a longer
        prefix, that prefix is copied to `oldest`.
        """
        slot, shared = self._take(request, free, oldest)
        self._num_written[slot] = 0
        self._keys[slot].clear()
        self._owners[slot] = request.owner
        return slot, shared

    def _take(self, request: Request, free: Sequence[int], oldest: int) -> tuple[int, int]:
        pool = self._pool
        shared = self._num_usable(request)
        best = max(free, key=lambda slot: shared[slot])
        if shared[best] and 2 * shared[best] >= len(pool.held(best)):
            pool.keep(best, shared[best])
            return best, shared[best]
        source = max(range(pool.num_slots), key=lambda slot: shared[slot])
        if shared[source] > shared[oldest]:
            pool.copy(source, oldest, shared[source])
            return oldest, shared[source]
        pool.keep(oldest, shared[oldest])
        return oldest, shared[oldest]

    def _num_usable(self, request: Request) -> list[int]:
        """Return, for each slot, how many of its first tokens a request's prompt can reuse."""
        pool = self._pool
        if request.has_prompt_logprobs:  # slots do not keep the logits of tokens they have read
            return [0] * pool.num_slots
        return [
            pool.usable(slot, num_shared(pool.held(slot), request.keys))
            if self._owners[slot] == request.owner
            else 0
            for slot in range(pool.num_slots)
        ]

    def catch_up(self, running: Running) -> int:
        """Copy a prompt's next tokens from another slot that now holds them; return their number.

        A common prefix of prompts that arrive together is thus computed once, chunk by chunk.
        """
        pool = self._pool
        shared = self._num_usable(running.request)
        source = max(range(pool.num_slots), key=lambda slot: shared[slot])
        gained = shared[source] - running.num_done
        if gained > 0:
            pool.copy(source, running.slot, shared[source])
            running.num_done = shared[source]
        return max(0, gained)

    def will_gain(self, running: Running, other: Running) -> bool:
        """Tell whether the prompts share over a quarter of the tokens that `running` lacks.

        If `other` is computed in this step, `running` should wait and then copy these tokens.
        """
        request, its = running.request, other.request
        if request.has_prompt_logprobs or request.owner != its.owner:
            return False
        gained = num_shared(its.keys, request.keys) - running.num_done
        return _MUCH * gained > len(request.prompt) - running.num_done

    # ---- disk ------------------------------------------------------------------------------------

    def find(self, running: Running) -> None:
        """Set `running.on_disk` to the next segments of its prompt that are on disk."""
        disk = self._disk
        if disk is None or running.request.has_prompt_logprobs:
            return
        files = disk.files
        keys = files.keys(running.request.keys[:-1], owner=running.request.owner)
        first = running.num_done // SEGMENT_TOKENS
        end = first
        while end < len(keys) and files.has(keys[end]):
            end += 1
        if disk.slots.states:  # what follows the last stored state must be computed
            while end > first and not files.has(files.states_key(keys[end - 1])):
                end -= 1
        running.on_disk = [(number * SEGMENT_TOKENS, keys[number]) for number in range(first, end)]

    def read(self, running: Running, *, is_alone: bool) -> int:
        """Read a prompt's next segments from disk into its slot; return the number of tokens read.

        With `is_alone` (no other request waits for a token) all segments are read, else only a few.
        """
        disk, before = self._disk, running.num_done
        if disk is None:
            return 0
        for _ in range(len(running.on_disk) if is_alone else _READ_WITH_OTHERS):
            if not running.on_disk or not self._read_one(disk, running):
                break
        return running.num_done - before

    def _read_one(self, disk: _Disk, running: Running) -> bool:
        """Read a prompt's next segment from disk into its slot; return whether the slot holds it.

        A segment that the slot already holds is not read. After a failure no further segments of
        the prompt are read.
        """
        first, key = running.on_disk.pop(0)
        # The tokens came from another slot meanwhile.
        if first + SEGMENT_TOKENS <= running.num_done:
            return True
        files, slots, slot = disk.files, disk.slots, running.slot
        data = files.read(key)
        if data is None or not slots.cut(slot, first):
            return self._give_up(disk, running)
        slots.put_in(slot, running.request.keys[first : first + SEGMENT_TOKENS], data)
        running.num_done = first + SEGMENT_TOKENS
        if slots.states and not running.on_disk:
            states = files.read(files.states_key(key))
            if states is None:
                return self._give_up(disk, running)
            slots.states.put_in(slot, running.num_done, states)
        self.num_read_tokens += SEGMENT_TOKENS
        return True

    def _give_up(self, disk: _Disk, running: Running) -> bool:
        """Forget a prompt's remaining segments on disk; return False, for `_read_one` to return.

        A slot with states is cut to the longest prefix that a request can continue from.
        """
        pool, slot = self._pool, running.slot
        running.on_disk.clear()
        if disk.slots.states:
            usable = pool.usable(slot, min(running.num_done, len(pool.held(slot))))
            pool.keep(slot, usable)
            running.num_done = usable
        return False

    @property
    def has_unwritten(self) -> bool:
        """Whether slots hold whole segments that `write_some` has not examined."""
        if self._disk is None:
            return False
        held = (len(self._pool.held(slot)) for slot in range(self._pool.num_slots))
        return any(n // SEGMENT_TOKENS > m for n, m in zip(held, self._num_written, strict=True))

    def close(self, seconds: float) -> None:
        """Write the slots' segments to disk, for at most `seconds`, and stop the writer."""
        if self._disk is None:
            return
        end = time.monotonic() + seconds
        while self.has_unwritten and time.monotonic() < end:
            if not self.write_some():
                time.sleep(_PAUSE_SECONDS)
        self._disk.files.close(max(0.0, end - time.monotonic()))

    @property
    def num_bytes_on_disk(self) -> int:
        """The bytes of all prefix files; 0 if prefixes are not written to disk."""
        return 0 if self._disk is None else self._disk.files.num_bytes

    def write_some(self) -> bool:
        """Hand a segment that is not on disk to the writer; return whether one was handed over."""
        disk = self._disk
        if disk is None or not disk.files.takes_more:
            return False
        for slot in range(self._pool.num_slots):
            held = self._pool.held(slot)
            if len(held) // SEGMENT_TOKENS <= self._num_written[slot]:
                continue
            self._keys[slot] = disk.files.keys(held, self._keys[slot], owner=self._owners[slot])
            while (number := self._num_written[slot]) < len(self._keys[slot]):
                self._num_written[slot] += 1
                if self._write_one(disk, slot, number):
                    return True
        return False

    def _write_one(self, disk: _Disk, slot: int, number: int) -> bool:
        """Hand a slot's segment `number` to the writer unless it is on disk.

        If states are stored at the end of this segment, the slot's states there are handed over
        too. Returns whether anything was handed over.
        """
        files, key, first = disk.files, self._keys[slot][number], number * SEGMENT_TOKENS
        found = {}
        if not files.has(key):
            found[key] = disk.slots.take_out(slot, first, SEGMENT_TOKENS)
        states_key = files.states_key(key)
        if (number + 1) % SEGMENTS_BETWEEN_STATES == 0 and not files.has(states_key):
            found[states_key] = disk.slots.states.take_out(slot, first + SEGMENT_TOKENS)
        for one, data in found.items():
            if data is not None:
                files.offer(one, data)
        return any(data is not None for data in found.values())
