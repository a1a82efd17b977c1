"""`Generator`: answers prompts with a loaded model, token by token.

    generator = tandem.Generator(model, tokenizer)
    answer, = generator.generate("Once upon a time", max_new_tokens=64)

Prompts become requests of a `Scheduler`, as in the server; here a scheduler has the requests of one
call.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from tandem.core.config import from_mapping
from tandem.core.errors import ConfigError, TandemWarning
from tandem.decode.cpu_slots import CpuSlotPool, why_no_cpu_slots
from tandem.decode.images import ImagePrompt, require_images, why_no_slot_images
from tandem.decode.padded import PaddedSlotPool
from tandem.decode.slots import SlotPool
from tandem.foreign_types import PreTrainedModel, Tokenizer
from tandem.generate.answer import Answer
from tandem.generate.batch import Batch
from tandem.generate.constraints import FollowGrammar, no_grammars
from tandem.generate.images import Processor
from tandem.generate.kept_prefixes import KeptPrefixes
from tandem.generate.next_token_models import (
    adapter_state,
    context_tokens,
    require_next_token_model,
    without_adapters_wrapper,
)
from tandem.generate.pace import Pace
from tandem.generate.prefill_chunks import CHUNK_TOKENS
from tandem.generate.prompt import encode_messages, room
from tandem.generate.request import Request
from tandem.generate.sampling import SamplingOptions, not_followed
from tandem.generate.scheduler import Scheduler
from tandem.generate.speculation.drafters import DraftParts, new_speculation
from tandem.generate.trial_notes import TrialNote
from tandem.hf.dense import pack_dense_layers, share_threads
from tandem.hf.runtime import runtime_of
from tandem.hf.steps import MAX_STEP_TOKENS
from tandem.kernels.attention import require_kv_dtype
from tandem.kernels.dense import CpuThreads
from tandem.recording.recorded_graph import RecordedGraph
from tandem.text.text_tokens import token_ids

# Text to continue, a conversation for the chat template, token ids, or a processor's result.
Prompt = str | Sequence[Mapping[str, object]] | Sequence[int] | Tensor | ImagePrompt
TextListener = Callable[[int, str], None]


class Generator:
    """Answers prompts with one model; keeps the last call's keys and values for the next call."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer | None = None,
        *,
        processor: Processor | None = None,
        threads: CpuThreads | None = None,
        dense_dtype: str = "none",
        kv_dtype: str = "auto",
        has_replay: bool = True,
        speculate: str = "auto",
        draft: PreTrainedModel | None = None,
        mtp_from: Path | None = None,
        shares_answers: bool = True,
    ) -> None:
        """Use a Transformers model; without a tokenizer, prompts and answers are token ids.

        With the model's `processor`, messages may have images: parts of their content that are
        {"type": "image", "image": a path, the bytes of a file, or a PIL image}.
        `threads` compute attention and packed layers (default: the threads of the model's experts).
        `dense_dtype` permanently packs the model's linear layers: "int8", "int4", "bf16", "auto"
        (int8 if the experts are quantised too) or "none"; `tandem.load(..., dense_dtype=...)` packs
        them while loading. `kv_dtype` is the dtype of the KV cache: "auto" (the model's dtype; bf16
        for GGUF files), "bf16" or "int8". Decode steps are recorded and replayed without the
        model's Python code and its hooks, unless `has_replay` is false.
        `speculate` selects the drafters: "auto", "lookup" (prompt look-up: the tokens that followed
        an earlier occurrence of the latest tokens), "mtp" (also the model's MTP layer, from the
        checkpoint `mtp_from` or the model's own) or "none". `draft` is a small model with the same
        tokens, which drafts too. Drafting does not change answers. Unless `shares_answers`,
        nothing is drafted from answers to other prompts.
        Raises `UnsupportedModelError` for models that do not generate text token by token.
        """
        model = without_adapters_wrapper(model)
        require_next_token_model(model)
        self.model = model
        self._adapters = adapter_state(model)
        self.tokenizer, self.processor = tokenizer, processor
        runtime = runtime_of(model)
        self._threads = threads or (CpuThreads() if runtime is None else runtime.threads)
        pack_dense_layers(model, dense_dtype, self._threads)
        share_threads(model, self._threads)  # also layers that were packed before
        self._kv_dtype = require_kv_dtype(kv_dtype)
        if self._kv_dtype == "auto" and runtime is not None:
            self._kv_dtype = runtime.kv_dtype
        self._has_replay = has_replay
        parts = DraftParts(
            model=model, threads=self._threads, draft=draft, mtp_from=mtp_from,
            shares_answers=shares_answers,
        )  # fmt: skip
        self.speculation = new_speculation(speculate, parts)
        """The drafters for all requests; None: no drafting."""
        self._has_tried_slots = False
        self.why_padded: str | None = None
        """Why prompts run padded on Transformers' caches; None: they do not, or this is not known
        yet."""
        self._pool: SlotPool | None = None
        self._latest_pool: SlotPool | None = None
        self._batch: Batch | None = None
        ignored = not_followed(model.generation_config)
        if ignored:
            warnings.warn(
                f"the model's generation config sets {', '.join(ignored)}, which Tandem's loop "
                "does not follow; call model.generate(...) where it matters",
                TandemWarning,
                stacklevel=2,
            )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        options: SamplingOptions | None = None,
        *,
        on_text: TextListener | None = None,
        **fields: object,
    ) -> list[Answer]:
        """Answer one prompt, or several together; return the answers in the order of the prompts.

        `fields` are fields of `SamplingOptions` and override `options`. `on_text` is called with
        (number of the prompt, piece of text) as text comes. Raises `ConfigError` for a prompt that
        is empty, too long or holds unknown token ids, before anything is computed.
        """
        batch = self.start(prompts, options, on_text=on_text, **fields)
        while not batch.is_done:
            batch.advance()
        return batch.answers()

    def answer(
        self, prompt: Prompt, options: SamplingOptions, on_text: Callable[[str], None]
    ) -> Answer:
        """Answer a prompt; after Ctrl-C (KeyboardInterrupt), return the answer up to then."""
        batch = self.start([prompt], options, on_text=lambda _, piece: on_text(piece))
        try:
            while not batch.is_done:
                batch.advance()
        except KeyboardInterrupt:
            batch.interrupt()
        return batch.answers()[0]

    def stream(
        self, prompt: Prompt, options: SamplingOptions | None = None, **fields: object
    ) -> Iterator[str]:
        """Yield the answer to one prompt in pieces, while it is generated."""
        pieces: list[str] = []
        batch = self.start(
            [prompt], options, on_text=lambda _, piece: pieces.append(piece), **fields
        )
        while not batch.is_done:
            batch.advance()
            yield from pieces
            pieces.clear()

    def start(
        self,
        prompts: Prompt | Sequence[Prompt],
        options: SamplingOptions | None = None,
        *,
        on_text: TextListener | None = None,
        **fields: object,
    ) -> Batch:
        """Check the prompts and return their batch; nothing is computed yet.

        If the last call had the same number of prompts, prefixes that the KV cache still holds are
        reused. An unfinished batch of the last call is interrupted.
        """
        options = _merged(options, fields)
        if options.stop and self.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer; pass one to Generator")
        encoded = [self._encode(prompt) for prompt in _as_list(prompts)]
        if not encoded:
            raise ConfigError("there is no prompt; give one or several")
        ids = [one.ids if isinstance(one, ImagePrompt) else one for one in encoded]
        images = [one if isinstance(one, ImagePrompt) else None for one in encoded]
        rooms = [room(self.model, prompt, number) for number, prompt in enumerate(ids)]
        longest = max(map(len, ids)) + min(options.max_new_tokens, *rooms, MAX_STEP_TOKENS)
        if self._batch is not None:
            self._batch.interrupt()
        requests = [
            Request(
                request_id=number, prompt=tuple(prompt), options=_of_row(options, number),
                images=images[number],
            )
            for number, prompt in enumerate(ids)
        ]  # fmt: skip
        pool = self._pool_for(len(ids), longest, has_images=any(images))
        scheduler = Scheduler(
            self.model, self.tokenizer, pool, chunk_tokens=MAX_STEP_TOKENS, merges_prompts=True,
            speculation=self.speculation,
        )  # fmt: skip
        self._batch = Batch(scheduler, requests, on_text or (lambda _row, _piece: None))
        return self._batch

    def scheduler(
        self,
        max_running: int,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        kept: KeptPrefixes | None = None,
        pace: Pace | None = None,
        follow_grammar: FollowGrammar = no_grammars,
    ) -> Scheduler:
        """Return a new scheduler, to which requests can be added at any time: `Scheduler.add`.

        The scheduler runs one request at a time if the model must run padded. Prefixes of prompts
        are kept on disk in `kept`; `pace` limits how long streams wait for prompts;
        `follow_grammar` makes constraints from grammars.
        """
        self.prepare()
        num_slots = max_running if self.why_padded is None else 1
        pool = self.slot_pool(num_slots)
        return Scheduler(
            self.model, self.tokenizer, pool, chunk_tokens=chunk_tokens,
            speculation=self.speculation,
            files=None if kept is None else kept.open(self.model, pool), pace=pace,
            follow_grammar=follow_grammar,
        )  # fmt: skip

    def prepare(self) -> None:
        """Find out, once, whether the model can run in sequence slots; if not, set `why_padded`.

        On a CPU this runs a few tokens in slots and padded.
        """
        if self._has_tried_slots:
            return
        if self.model.device.type == "cuda":
            from tandem.decode.cuda.slots import why_no_cuda_slots

            self.why_padded = why_no_cuda_slots(self.model)
        else:
            self.why_padded = why_no_cpu_slots(self.model, self._threads)
        self._has_tried_slots = True

    def warm_up(self, notes: Path) -> None:
        """Find out how the model can run, and record the decode step of one sequence in advance.

        The first tokens then come as fast as later tokens. A passed trial is noted in the directory
        `notes`, so that the next start takes a fraction of the time. Does nothing for a model on a
        GPU or with adapters.
        """
        if self.model.device.type != "cpu" or self._adapters:
            return
        note = TrialNote(notes, self.model, self._threads, self._kv_dtype)
        has_passed = note.is_there
        self._has_tried_slots = self._has_tried_slots or has_passed
        pool = self._pool_for(1, 1, has_images=False)
        if not isinstance(pool, CpuSlotPool) or not self._has_replay:
            return
        if pool.record_ahead(has_passed=has_passed) and not has_passed:
            note.write()

    def slot_pool(self, num_slots: int, *, capacity: int = 0) -> SlotPool:
        """Return a pool of `num_slots` sequence slots, of the fastest kind that can run the model.

        Each slot has room for `capacity` tokens at first.
        """
        self.prepare()
        if self.why_padded is not None:
            self._latest_pool = PaddedSlotPool(self.model, num_slots, self._pad_id())
            return self._latest_pool
        new_pool: Callable[..., SlotPool] = partial(CpuSlotPool, self.model, self._threads)
        if self.model.device.type == "cuda":
            from tandem.decode.cuda.slots import new_cuda_slot_pool

            new_pool = partial(new_cuda_slot_pool, self.model)
        self._latest_pool = new_pool(
            num_slots, capacity=capacity, has_replay=self._has_replay, kv_dtype=self._kv_dtype,
            notes_hidden=self.speculation is not None and self.speculation.needs_hidden,
        )  # fmt: skip
        return self._latest_pool

    def _pool_for(self, num_slots: int, capacity: int, *, has_images: bool) -> SlotPool:
        """Return the last call's pool, or a new one if the number of slots or the adapters changed.

        Prompts with images get a padded pool of their own if the model cannot read them in slots.
        """
        if has_images and why_no_slot_images(self.model) is not None:
            return PaddedSlotPool(self.model, num_slots, self._pad_id())
        if (adapters := adapter_state(self.model)) != self._adapters:
            self._adapters, self._pool, self._latest_pool = adapters, None, None
        if self._pool is None or self._pool.num_slots != num_slots:
            self._pool = self._latest_pool = None  # free its memory before allocating other memory
            self._pool = self.slot_pool(num_slots, capacity=capacity)
        return self._pool

    @property
    def why_slower(self) -> str | None:
        """Why decode steps run the model's own code, as one sentence; None: they do not."""
        if self.why_padded is not None:
            return f"steps run padded, on Transformers' own caches: {self.why_padded}"
        step = None if self._latest_pool is None else self._latest_pool.step
        if self._has_replay and step is not None and step.why_not is not None:
            return f"decode steps are not replayed: {step.why_not}"
        return None

    @property
    def recorded_graph(self) -> RecordedGraph | None:
        """The replayed graph of the last decode step on the CPU; None: it was not replayed."""
        step = None if self._latest_pool is None else self._latest_pool.step
        recording = None if step is None else step.recording
        return recording if isinstance(recording, RecordedGraph) else None

    def _encode(self, prompt: Prompt) -> list[int] | ImagePrompt:
        if isinstance(prompt, ImagePrompt):
            require_images(self.model)
            return prompt
        if isinstance(prompt, Tensor):
            return [int(token) for token in prompt.flatten().tolist()]
        if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
            return list(prompt)  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise ConfigError("a prompt of text needs a tokenizer; pass one to Generator")
        if isinstance(prompt, str):
            most = context_tokens(self.model)
            return token_ids(self.tokenizer, prompt, has_special=True, most_tokens=most)
        return encode_messages(self.model, self.tokenizer, self.processor, prompt)  # type: ignore[arg-type]

    def _pad_id(self) -> int:
        pad = self.model.generation_config.pad_token_id
        if pad is None and self.tokenizer is not None:
            pad = self.tokenizer.pad_token_id
        return pad if pad is not None else 0  # positions with it are masked


def _of_row(options: SamplingOptions, number: int) -> SamplingOptions:
    """Return the options of prompt `number` of a call; its seed is the call's plus `number`."""
    seed = options.seed
    return options if seed is None else dataclasses.replace(options, seed=seed + number)


def _merged(options: SamplingOptions | None, fields: dict[str, Any]) -> SamplingOptions:
    given = {} if options is None else dataclasses.asdict(options)
    if "stop" in fields:
        stop = fields["stop"]
        fields["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return from_mapping(SamplingOptions, {**given, **fields}, where="generate")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts; a list of ids or of messages is one prompt."""
    if isinstance(prompts, str | ImagePrompt):
        return [prompts]
    if isinstance(prompts, Tensor):
        return list(prompts) if prompts.dim() == 2 else [prompts]
    is_one = len(prompts) > 0 and all(isinstance(part, int | dict) for part in prompts)
    return [prompts] if is_one else list(prompts)  # type: ignore[list-item, arg-type]
