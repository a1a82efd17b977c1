"""Continuous batching: requests join a running batch at any step, and leave it at any step.

One step is at most one prefill chunk, and one token for every request whose prompt is complete.
Prompts take turns chunk by chunk, so a long prompt delays neither streams of tokens nor short
prompts that arrive later. A request reuses its prompt's prefix if the KV cache holds one. A single
prompt is a batch of one.

A chunk may hold tokens of several prompts, and the next token of each stream. If its forward fails,
the prompts are computed one by one, so that only the prompt that causes the error fails.

A request's answer does not depend on the other requests in the batch. Its tokens are drawn from its
own random numbers, and the packed kernels are batch-invariant, so that a prompt may be cut
anywhere. Where a model's linear layers are not packed, torch's products depend on the batch size:
there a prompt is cut at fixed places and runs alone, and the last bits of logits may still differ.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from tandem.decode.slots import SlotPool
from tandem.foreign_types import PreTrainedModel, Tokenizer
from tandem.generate.constraints import FollowGrammar, constraints_of, no_grammars
from tandem.generate.held_prefixes import HeldPrefixes
from tandem.generate.next_token_models import end_of_sequence_ids
from tandem.generate.pace import Pace
from tandem.generate.prefill_chunks import CHUNK_TOKENS, ChunkPart, PrefillChunks
from tandem.generate.prompt import room
from tandem.generate.request import Request
from tandem.generate.running import Running, logprob_of
from tandem.generate.sampler import Sampler
from tandem.generate.speculation.speculation import Speculation
from tandem.generate.stopping import StopStrings
from tandem.generate.text import TextStream
from tandem.generate.token_output import BatchCounts, Failure, StepFailedError, TokenOutput
from tandem.generate.waiting_line import WaitingLine
from tandem.kv_cache.prefix_files import PrefixFiles


class Scheduler:
    """Answers many requests, which share its steps. Only one thread may call it."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        pool: SlotPool,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        merges_prompts: bool = False,
        speculation: Speculation | None = None,
        files: PrefixFiles | None = None,
        pace: Pace | None = None,
        follow_grammar: FollowGrammar = no_grammars,
    ) -> None:
        """Serve as many requests at a time as `pool` has slots; further requests wait.

        With `merges_prompts` a prefill chunk may hold several prompts even where the last bits of
        their logits then depend on each other. A chunk has at most `chunk_tokens` prompt tokens if
        the pool can prefill in chunks. `speculation` drafts tokens where verifying them cannot
        change an answer. Prefixes of prompts are also kept in `files`: see `prefixes`. `pace`
        limits how long streams wait for prompts, if prompts may be cut anywhere. Requests with a
        lower priority number come first.
        """
        self._model, self._tokenizer, self._pool = model, tokenizer, pool
        self._pace, self._follow_grammar = pace, follow_grammar
        self._speculation = speculation
        if speculation is not None:
            speculation.follow(pool)
        self._last_used = [0.0] * pool.num_slots
        self.prefixes = HeldPrefixes(pool, files)
        """The prefixes in slots and on disk; between steps the caller should call `write_some`."""
        self._chunks = PrefillChunks(
            model, pool, self.prefixes, pace, chunk_tokens=chunk_tokens,
            merges_prompts=merges_prompts,
        )  # fmt: skip
        self._waiting = WaitingLine[Request]()
        self._prefilling: list[Running] = []
        self._decoding: list[Running] = []
        self._end_ids = end_of_sequence_ids(model)
        self._failures: list[Failure] = []
        self.counts = BatchCounts()

    @property
    def max_running(self) -> int:
        """The largest number of requests that run at a time."""
        return self._pool.num_slots

    @property
    def num_running(self) -> int:
        """How many requests have a slot."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        """How many requests wait for a slot."""
        return len(self._waiting)

    @property
    def kv_cache_bytes(self) -> int | None:
        """The present size of the KV cache in bytes; None if the KV cache is Transformers'."""
        return self._pool.num_bytes

    @property
    def has_work(self) -> bool:
        """Whether there are running or waiting requests."""
        return bool(self.num_running or self.num_waiting)

    def add(self, request: Request) -> None:
        """Queue a request; it joins at the next step if a slot is free.

        Raises `ConfigError` if the prompt is empty, too long or has unknown token ids.
        """
        room(self._model, request.prompt)
        self._waiting.add(request.request_id, request.priority, request)

    def cancel(self, request_id: int) -> bool:
        """Drop a request and free its slot at once; return whether it was running or waiting."""
        running = self._running(request_id)
        if running is not None:
            self._release(running)
        return running is not None or self._waiting.drop([request_id]) > 0

    def interrupt(self, request_id: int) -> TokenOutput | None:
        """Drop a request; return its held-back text as an output, None if it was not running."""
        running = self._running(request_id)
        if running is None:
            self.cancel(request_id)
            return None
        self._release(running)
        return running.output(None, running.interrupt())

    def _running(self, request_id: int) -> Running | None:
        running = (*self._prefilling, *self._decoding)
        return next((one for one in running if one.request.request_id == request_id), None)

    def step(self) -> list[TokenOutput]:
        """Prefill a chunk, and decode a token for each request whose prompt is complete.

        Returns the outputs. Raises `StepFailedError` if this fails for some requests, which are
        dropped; all others continue. A prompt fails alone where it can be computed alone. Requests
        that decode together fail together if the model's forward fails; a request whose next token
        cannot be chosen fails alone.
        """
        self._admit()
        token_outputs = []
        decoding = list(self._decoding)
        chunk = self._chunks.next(self._prefilling, self.counts, num_streams=len(decoding))
        may_join = chunk and decoding and self._chunks.may_join(chunk[0].running)
        joining = decoding if may_join else []
        if chunk:
            token_outputs += self._prefill_or_part(chunk, joining)
        if decoding and not joining:
            together = [running.request for running in decoding]
            token_outputs += self._attempt(together, partial(self._decode, decoding))
        failures, self._failures = self._failures, []
        if failures:
            raise StepFailedError(failures, token_outputs)
        return token_outputs

    def _attempt(
        self, requests: list[Request], work: Callable[[], list[TokenOutput]]
    ) -> list[TokenOutput]:
        """Return `work()`; on an error, drop `requests`, record the failure and return []."""
        try:
            return work()
        except Exception as error:
            numbers = tuple(request.request_id for request in requests)
            for number in numbers:
                self.cancel(number)
            self._failures.append(Failure(numbers, error))
            return []

    def _prefill_or_part(self, chunk: list[ChunkPart], joining: list[Running]) -> list[TokenOutput]:
        """Compute a chunk and the next tokens of the streams that join it; return the outputs.

        If a forward of several requests fails, returns []: its prompts will run alone from then on,
        and streams whose slots cannot be cut back to before the error are dropped. A prompt that
        fails alone is dropped, and so are all prompts of a pool that cannot prefill in chunks.
        """
        prompts = [running for running, _ in chunk]
        if len(chunk) + len(joining) == 1 or not self._pool.can_prefill_in_chunks:
            requests = [one.request for one in prompts]
            return self._attempt(requests, partial(self._prefill, chunk, joining))
        try:
            return self._prefill(chunk, joining)
        except Exception as error:
            for one in prompts:
                one.num_done, one.is_alone = self._go_back(one.slot, one.num_done), True
            lost = [
                one.request.request_id
                for one in joining
                if self._go_back(one.slot, len(one.history) - 1) < len(one.history) - 1
            ]
            for number in lost:
                self.cancel(number)
            if lost:
                self._failures.append(Failure(tuple(lost), error))
            return []

    def _go_back(self, slot: int, length: int) -> int:
        """Cut a slot to at most `length` tokens after a failure; return its number of tokens."""
        left = self._pool.usable(slot, min(length, len(self._pool.held(slot))))
        self._pool.keep(slot, left)
        return left

    def _admit(self) -> None:
        while self.num_waiting and self.num_running < self.max_running:
            request = self._waiting.pop()
            self._attempt([request], partial(self._begin, request))

    def _begin(self, request: Request) -> list[TokenOutput]:
        """Give a request a slot; return no outputs, because nothing is computed yet."""
        end_ids = request.options.end_ids(self._end_ids)
        # First, because a grammar may fail, and no slot must have changed then.
        constraints = [*constraints_of(request, end_ids, self._tokenizer, self._follow_grammar)]
        busy = {running.slot for running in (*self._prefilling, *self._decoding)}
        free = [slot for slot in range(self.max_running) if slot not in busy]
        oldest = min(free, key=self._last_used.__getitem__)
        slot, shared = self.prefixes.take(request, free, oldest)
        self._pool.show(slot, request.images)
        options = request.options
        running = Running(
            request=request,
            slot=slot,
            max_new_tokens=min(options.max_new_tokens, room(self._model, request.prompt)),
            sampler=Sampler(options.rule(self._model.generation_config), 1, options.seed),
            stop=StopStrings(options.stop),
            text=None
            if self._tokenizer is None
            else TextStream(self._tokenizer, keeps_special=request.keeps_special),
            history=list(request.prompt),
            reused_tokens=shared,
            num_done=shared,
            end_ids=end_ids,
            constraints=constraints,
            prompt_logprobs=[None] if request.has_prompt_logprobs else None,
        )
        self.prefixes.find(running)
        self._prefilling.append(running)
        self.counts.reused_tokens += shared
        return []

    def _prefill(self, chunk: list[ChunkPart], joining: list[Running]) -> list[TokenOutput]:
        """Compute a chunk's prompt tokens, and the next tokens of the streams that join it.

        Returns the outputs of prompts that are now complete, and of the joining streams.
        """
        start, part = time.perf_counter(), len(self._decoding) / self.num_running
        num_tokens = sum(end - one.num_done for one, end in chunk)
        logits = self._chunk_logits(chunk, joining)
        self.counts.prompt_tokens += num_tokens
        token_outputs: list[TokenOutput] = []
        for row, (running, end) in enumerate(chunk):
            running.num_done = end
            self._prefilling.remove(running)
            if end < len(running.request.prompt):
                self._prefilling.append(running)
            else:
                self._decoding.append(running)
                token_outputs += self._begin_answer(running, logits[row : row + 1])
        for row, running in enumerate(joining, len(chunk)):
            choose = partial(self._choose, running, logits[row : row + 1])
            token_outputs += self._attempt([running.request], choose)
        seconds = time.perf_counter() - start
        self.counts.prefill_seconds += seconds
        if self._pace is not None:
            self._pace.prefilled(num_tokens, seconds, part=part, has_decoded=bool(joining))
        return token_outputs

    def _chunk_logits(self, chunk: list[ChunkPart], joining: list[Running]) -> Tensor:
        """Return the logits after each request's last new token: (requests, vocabulary)."""
        new = {one.slot: one.request.keys[one.num_done : end] for one, end in chunk}
        first = chunk[0][0]
        if first.prompt_logprobs is None:
            return self._pool.prefill(new | {one.slot: (one.history[-1],) for one in joining})
        all_logits = self._pool.prefill_with_logits(first.slot, new[first.slot])
        first.note_prompt(all_logits, first.num_done)
        return all_logits[-1:]

    def _begin_answer(self, running: Running, logits: Tensor) -> list[TokenOutput]:
        """Choose a request's first token, or end it if it `is_prompt_only`; return the output."""
        if not running.request.is_prompt_only:
            return self._attempt([running.request], partial(self._choose, running, logits))
        self._release(running)
        running.finish_reason = "length"
        return [running.output(None, "")]

    def _decode(self, batch: list[Running]) -> list[TokenOutput]:
        start = time.perf_counter()
        batch.sort(key=lambda running: running.slot)
        drafts = self._drafts(batch)
        tokens = {one.slot: (one.history[-1], *drafts.get(one.slot, ())) for one in batch}
        logits, accepted = self._verify(tokens), self.counts.accepted_tokens
        token_outputs = []
        for one, of_one in zip(batch, logits.split([*map(len, tokens.values())]), strict=True):
            token_outputs += self._attempt(
                [one.request], partial(self._choose_all, one, tokens[one.slot][1:], of_one)
            )
        if drafts and self._speculation is not None:
            num_kept = len(batch) + self.counts.accepted_tokens - accepted
            self._speculation.note_kept(len(logits), num_kept)
        self.counts.decode_steps += 1
        seconds = time.perf_counter() - start
        self.counts.decode_seconds += seconds
        if self._pace is not None:
            self._pace.decoded(seconds)
        return token_outputs

    def _drafts(self, batch: list[Running]) -> dict[int, Sequence[int]]:
        """Return the drafted tokens that a step verifies, by slot."""
        if self._speculation is None or not self._speculation.can_verify(self._pool):
            return {}
        drafting = [one for one in batch if one.request.may_speculate]
        return self._speculation.choose(
            {one.slot: one.history for one in drafting},
            {one.slot: one.max_new_tokens - one.generated - 1 for one in drafting},
            len(batch),
        )

    def _verify(self, tokens: Mapping[int, Sequence[int]]) -> Tensor:
        """Append tokens to slots; return the logits after each token: (n_tokens, vocabulary)."""
        start = time.perf_counter()
        logits = self._pool.verify(tokens)
        step = self._pool.step
        if self._speculation is not None and step is not None and step.has_settled:
            self._speculation.costs.add(len(logits), time.perf_counter() - start)
        return logits

    def _choose_all(
        self, running: Running, draft: Sequence[int], logits: Tensor
    ) -> list[TokenOutput]:
        """Choose a request's tokens, up to the first that was not drafted; return their outputs."""
        token_outputs, num_kept = [], 0
        running.drafted += len(draft)
        for drafted in (*draft, None):
            token_outputs += self._choose(running, logits[num_kept : num_kept + 1], drafted)
            if running.finish_reason is not None or running.history[-1] != drafted:
                break
            num_kept += 1
        if num_kept < len(draft):
            held = len(self._pool.held(running.slot))
            self._pool.keep(running.slot, held - len(draft) + num_kept)
        self.counts.drafted_tokens += len(draft)
        self.counts.accepted_tokens += num_kept
        return token_outputs

    def _choose(
        self, running: Running, logits: Tensor, drafted: int | None = None
    ) -> list[TokenOutput]:
        """Choose a request's next token from logits (1, vocabulary); return its output.

        `drafted` is the token drafted for this position; None if no token was drafted.
        """
        request, scores = running.request, logits
        for constraint in running.constraints:
            scores = constraint.restrict(scores)
        (token,) = running.sampler.choose(scores, [running.history])
        text = running.take(token)
        running.accepted += token == drafted
        self.counts.generated_tokens += 1
        logprob = None
        if request.num_top_logprobs is not None:
            logprob = logprob_of(logits[0], token, request.num_top_logprobs)
        if running.finish_reason is not None:
            self._release(running)
        return [running.output(token, text, logprob)]

    def _release(self, running: Running) -> None:
        (self._decoding if running in self._decoding else self._prefilling).remove(running)
        self._last_used[running.slot] = time.monotonic()
        if self._speculation is not None:
            self._speculation.forget(running.slot)
