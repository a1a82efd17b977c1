"""Continuous batching: requests join a running batch at any step, and leave it at any step.

One step is at most one prefill chunk of one prompt, and then one token for every request that is
past its prompt. Prompts alternate chunk by chunk, so a long one neither stops the streams nor the
short prompts behind it. A request finds its prompt's beginning in the KV cache if a row holds it.

An answer does not depend on what else is in the batch: its prompt runs by itself, its tokens are
drawn from its own random numbers, and the packed kernels compute a row alike in any batch, so that
prefill chunks may be of any length: shorter while others are answered. Where a model's linear
layers are not packed, torch multiplies batches of other sizes in another order: there chunks end at
fixed positions, and the last bits of logits may still differ.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from tandem.decode.padded import end_of_sequence_ids
from tandem.decode.slots import BorrowedSlots
from tandem.generate.ending import NotYet
from tandem.generate.generator import Generator
from tandem.generate.penalties import Together
from tandem.generate.running import Constraint, Request, Running, logprob_of
from tandem.generate.sampler import Sampler
from tandem.generate.stopping import StopStrings
from tandem.generate.text import TextStream
from tandem.generate.token_output import BatchCounts, TokenOutput

# A part of a prompt is what running streams wait for; shorter parts read the experts more often.
PART_TOKENS = 256
# While others are answered, parts are so much shorter: they wait less, the prompt takes longer.
_SHORTER_IN_COMPANY = 4


class Failure(NamedTuple):
    """What some requests came to that a step could not serve."""

    request_ids: tuple[int, ...]
    error: Exception


class StepFailedError(Exception):
    """A step failed for some requests, which are dropped; what it brought the others is here."""

    def __init__(self, failures: list[Failure], token_outputs: list[TokenOutput]) -> None:
        """Carry both; each failure has requests of its own."""
        super().__init__("; ".join(str(failure.error) for failure in failures))
        self.failures = failures
        self.token_outputs = token_outputs


@dataclass(slots=True)
class _Row:
    """Who has a row, and when it was last used."""

    running: Running | None = None
    last_used: float = 0.0


@dataclass(slots=True)
class _Queues:
    """Requests in the order in which they are served."""

    waiting: deque[Request] = field(default_factory=deque)
    prefilling: deque[Running] = field(default_factory=deque)
    decoding: list[Running] = field(default_factory=list)


class Batcher:
    """Answers requests together. One thread calls it."""

    def __init__(
        self, generator: Generator, *, max_running: int, part_tokens: int = PART_TOKENS
    ) -> None:
        """Serve up to `max_running` requests at a time; more wait, in their order."""
        self._generator = generator
        self._rows: BorrowedSlots = generator.slot_pool(max_running)
        self._part_tokens = part_tokens if self._rows.can_prefill_in_parts else 1 << 62
        self._is_alike_however_cut = self._rows.can_prefill_in_parts and not any(
            isinstance(module, nn.Linear) for module in generator.model.modules()
        )
        self._holders = [_Row() for _ in range(self._rows.num_rows)]
        self._queues = _Queues()
        self._end_ids = end_of_sequence_ids(generator.model)
        self._failures: list[Failure] = []
        self.counts = BatchCounts()

    @property
    def max_running(self) -> int:
        """How many requests run at a time."""
        return len(self._holders)

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self._queues.prefilling) + len(self._queues.decoding)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self._queues.waiting)

    @property
    def kv_cache_bytes(self) -> int | None:
        """Bytes that the KV cache takes now; None where Tandem does not hold it."""
        return self._rows.num_bytes

    @property
    def has_work(self) -> bool:
        """Tell whether a step would do anything."""
        return bool(self.num_running or self.num_waiting)

    def add(self, request: Request) -> None:
        """Take a request; it joins with the next step, if a row is free.

        Raises `ConfigError` for a prompt that the model cannot take.
        """
        self._generator.room(list(request.prompt))
        self._queues.waiting.append(request)

    def cancel(self, request_id: int) -> bool:
        """Drop a request, whose row is free at once; tell whether it was there."""
        for request in self._queues.waiting:
            if request.request_id == request_id:
                self._queues.waiting.remove(request)
                return True
        for running in (*self._queues.prefilling, *self._queues.decoding):
            if running.request.request_id == request_id:
                self._release(running)
                return True
        return False

    def step(self) -> list[TokenOutput]:
        """Prefill a part of a prompt and decode a token for each request that is past its own.

        Raises `StepFailedError` if that failed for some requests. They are dropped; the others go
        on: who prefills alone fails alone, those who decode together fail together if the model
        itself does, and alone if only the choice of their token does.
        """
        self._admit()
        token_outputs = []
        decoding = list(self._queues.decoding)
        if self._queues.prefilling:
            first = self._queues.prefilling[0]
            token_outputs += self._attempt([first.request], partial(self._prefill_part, first))
        if decoding:
            together = [running.request for running in decoding]
            token_outputs += self._attempt(together, partial(self._decode, decoding))
        failures, self._failures = self._failures, []
        if failures:
            raise StepFailedError(failures, token_outputs)
        return token_outputs

    def _attempt(
        self, requests: list[Request], work: Callable[[], list[TokenOutput]]
    ) -> list[TokenOutput]:
        """Do some requests' work; if it fails, drop them and note why."""
        try:
            return work()
        except Exception as error:
            numbers = tuple(request.request_id for request in requests)
            for number in numbers:
                self.cancel(number)
            self._failures.append(Failure(numbers, error))
            return []

    def _admit(self) -> None:
        waiting = self._queues.waiting
        while waiting and self.num_running < self.max_running:
            request = waiting.popleft()
            self._attempt([request], partial(self._begin, request))

    def _begin(self, request: Request) -> list[TokenOutput]:
        """Give a request a row; nothing is computed yet."""
        row, shared = self._borrow(request)
        end_ids = request.end.end_ids(self._end_ids)
        options = request.options
        room = self._generator.room(list(request.prompt))
        tokenizer = self._generator.tokenizer
        running = Running(
            request=request,
            row=row,
            max_new_tokens=min(options.max_new_tokens, room),
            sampler=Sampler(options.rule(self._generator.model.generation_config), 1, options.seed),
            stop=StopStrings(options.stop),
            text=None
            if tokenizer is None
            else TextStream(tokenizer, keeps_special=request.keeps_special),
            history=list(request.prompt),
            reused_tokens=shared,
            num_done=shared,
            end_ids=end_ids,
            constraint=_constraint(request, end_ids),
            prompt_logprobs=[None] if request.has_prompt_logprobs else None,
        )
        self._holders[row].running = running
        self._queues.prefilling.append(running)
        self.counts.reused_tokens += shared
        return []

    def _borrow(self, request: Request) -> tuple[int, int]:
        """Choose a free row for a prompt; return it and how much of the prompt it then holds.

        A row that would go on with what it holds is the best; else the one that was free longest,
        with what any row, a busy one included, holds of the prompt's beginning.
        """
        rows = self._rows
        shared = self._num_usable(request)
        free = [row for row, holder in enumerate(self._holders) if holder.running is None]
        best = max(free, key=lambda row: shared[row])
        if shared[best] and 2 * shared[best] >= len(rows.held(best)):
            rows.keep(best, shared[best])
            return best, shared[best]
        target = min(free, key=lambda row: self._holders[row].last_used)
        source = max(range(rows.num_rows), key=lambda row: shared[row])
        if shared[source] > shared[target]:
            rows.copy(source, target, shared[source])
            return target, shared[source]
        rows.keep(target, shared[target])
        return target, shared[target]

    def _num_usable(self, request: Request) -> list[int]:
        """Count, for each row, the tokens of a prompt's beginning with which it could go on."""
        rows = self._rows
        if request.has_prompt_logprobs:  # no row holds the logits of what it has read
            return [0] * rows.num_rows
        return [
            rows.usable(row, _num_shared(rows.held(row), request.prompt))
            for row in range(rows.num_rows)
        ]

    def _prefill_part(self, running: Running) -> list[TokenOutput]:
        """Run the next part of a prompt, up to a fixed place; after the last one, a token."""
        start = time.perf_counter()
        self._catch_up(running)
        prompt, first = running.request.prompt, running.num_done
        end = self._part_end(running)
        if running.prompt_logprobs is None:
            logits = self._rows.prefill(running.row, prompt[first:end])
        else:
            all_logits = self._rows.prefill_with_logits(running.row, prompt[first:end])
            running.note_prompt(all_logits, first)
            logits = all_logits[-1]
        running.num_done = end
        self.counts.prompt_tokens += end - first
        self._queues.prefilling.popleft()
        if end < len(prompt):
            self._queues.prefilling.append(running)
            token_outputs = []
        else:
            self._queues.decoding.append(running)
            is_over = running.request.end.is_prompt_only
            token_outputs = (
                self._end_at_prompt(running) if is_over else self._choose(running, logits[None])
            )
        self.counts.prefill_seconds += time.perf_counter() - start
        return token_outputs

    def _catch_up(self, running: Running) -> None:
        """Copy what another row has computed of a prompt since its request began.

        So prompts that came at once and begin alike are computed once, part by part.
        """
        rows = self._rows
        shared = self._num_usable(running.request)
        source = max(range(rows.num_rows), key=lambda row: shared[row])
        gained = shared[source] - running.num_done
        if gained > 0:
            rows.copy(source, running.row, shared[source])
            running.num_done = shared[source]
            running.reused_tokens += gained
            self.counts.reused_tokens += gained

    def _part_end(self, running: Running) -> int:
        """Return how many tokens of a prompt are computed after its next part."""
        size = self._part_tokens
        if self._queues.decoding and self._is_alike_however_cut:
            size = max(1, size // _SHORTER_IN_COMPANY)
        return min(len(running.request.prompt), (running.num_done // size + 1) * size)

    def _decode(self, batch: list[Running]) -> list[TokenOutput]:
        start = time.perf_counter()
        batch.sort(key=lambda running: running.row)
        logits = self._rows.decode({one.row: one.history[-1] for one in batch})
        token_outputs = []
        for i, one in enumerate(batch):
            token_outputs += self._attempt(
                [one.request], partial(self._choose, one, logits[i : i + 1])
            )
        self.counts.decode_steps += 1
        self.counts.decode_seconds += time.perf_counter() - start
        return token_outputs

    def _choose(self, running: Running, logits: Tensor) -> list[TokenOutput]:
        """Choose the next token of a request from its logits (1, vocabulary)."""
        request, constraint = running.request, running.constraint
        scores = logits if constraint is None else constraint.restrict(logits)
        (token,) = running.sampler.choose(scores, [running.history])
        text = running.take(token)
        self.counts.generated_tokens += 1
        logprob = None
        if request.num_top_logprobs is not None:
            logprob = logprob_of(logits[0], token, request.num_top_logprobs)
        if running.finish_reason is not None:
            self._release(running)
        token_output = TokenOutput(
            request_id=request.request_id,
            text=text,
            token_id=token,
            logprob=logprob,
            finish_reason=running.finish_reason,
            generated_tokens=running.generated,
            reused_tokens=running.reused_tokens,
            prompt_logprobs=running.told_prompt_logprobs(),
        )
        return [token_output]

    def _end_at_prompt(self, running: Running) -> list[TokenOutput]:
        """End a request of which the prompt alone was to be computed."""
        self._release(running)
        return [
            TokenOutput(
                request_id=running.request.request_id,
                text="",
                token_id=None,
                logprob=None,
                finish_reason="length",
                generated_tokens=0,
                reused_tokens=running.reused_tokens,
                prompt_logprobs=running.told_prompt_logprobs(),
            )
        ]

    def _release(self, running: Running) -> None:
        queues, holder = self._queues, self._holders[running.row]
        if running in queues.decoding:
            queues.decoding.remove(running)
        else:
            queues.prefilling.remove(running)
        holder.running, holder.last_used = None, time.monotonic()


def _constraint(request: Request, end_ids: frozenset[int]) -> Constraint | None:
    """Return what rules the choice of a request's tokens."""
    if not request.end.min_tokens:
        return request.constraint
    not_yet = NotYet(request.end.min_tokens, end_ids)
    return not_yet if request.constraint is None else Together([not_yet, request.constraint])


def _num_shared(held: Sequence[int], prompt: Sequence[int]) -> int:
    """Count the tokens that both begin with; the prompt's last one is computed again."""
    most = min(len(held), len(prompt) - 1)
    return next((i for i in range(most) if held[i] != prompt[i]), most)
