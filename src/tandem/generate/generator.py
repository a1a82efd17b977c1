"""`Generator`: answers prompts with a loaded model, token by token.

    generator = tandem.Generator(model, tokenizer)
    answer, = generator.generate("Once upon a time", max_new_tokens=64)

Knows prompts, tokens and when to stop; how a model is stepped is `tandem.decode.padded`'s.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.core.config import from_mapping
from tandem.core.errors import ConfigError, TandemWarning
from tandem.decode.cached_rows import CachedRows, try_rows
from tandem.decode.cuda.rows import CudaRows, new_cuda_rows, new_cuda_slot_pool, try_cuda_rows
from tandem.decode.padded import (
    PaddedRows,
    adapter_state,
    context_tokens,
    end_of_sequence_ids,
    require_next_token_model,
    vocabulary_size,
    without_adapters_wrapper,
)
from tandem.decode.recording.recorded_graph import RecordedGraph
from tandem.decode.slots import BorrowedSlots, LoneRow, SlotPool
from tandem.generate.answer import Answer
from tandem.generate.prompt import encode_conversation, encode_text
from tandem.generate.run import Rows, Run
from tandem.generate.sampling import SamplingOptions, not_followed
from tandem.hf.dense import pack_dense_layers
from tandem.hf.runtime import runtime_of
from tandem.kernels.attention import require_kv_dtype
from tandem.kernels.cpu import detect_cpu
from tandem.kernels.dense import CpuThreads

# Text to continue, a conversation for the chat template, or token ids.
Prompt = str | Sequence[Mapping[str, object]] | Sequence[int] | Tensor
TextListener = Callable[[int, str], None]
# A row that serves one request after another has room for answers of so many tokens at first.
_LONE_ANSWER_TOKENS = 512


class Generator:
    """Answers prompts with one model; keeps the last conversation, so that it can go on."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        threads: CpuThreads | None = None,
        dense_dtype: str = "none",
        kv_dtype: str = "auto",
        has_replay: bool = True,
    ) -> None:
        """Take a Transformers model; without a tokenizer prompts and answers are token ids.

        `threads` compute attention and packed layers (default: as many as the model's experts
        have). `dense_dtype` packs the model's linear layers for good: "int8", "int4", "bf16",
        "auto" (int8 if the experts are quantised too) or "none"; a model may also be loaded so
        (`tandem.load(..., dense_dtype=...)`). `kv_dtype` is what keys and values are kept in:
        "auto" (what the model computes in), "bf16" or "int8". Decode steps are recorded and
        replayed without the model's Python code (its hooks included), unless `has_replay` is false.
        Raises `UnsupportedModelError` for models that do not write token by token.
        """
        model = without_adapters_wrapper(model)
        require_next_token_model(model)
        self.model = model
        self._adapters = adapter_state(model)
        self.tokenizer = tokenizer
        self._threads = threads or _threads_of(model)
        pack_dense_layers(model, dense_dtype, self._threads)
        self._kv_dtype = require_kv_dtype(kv_dtype)
        self._has_replay = has_replay
        self._has_tried_rows = False
        self.why_padded: str | None = None
        """Why prompts run padded, on Transformers' caches; None: they do not, or not tried yet."""
        self._last: CachedRows | None = None
        self._last_on_gpu: CudaRows | None = None
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
        **fields: Any,
    ) -> list[Answer]:
        """Answer one prompt or several at once, in their order.

        `fields` are those of `SamplingOptions` and replace what `options` says. `on_text` receives
        (row, piece of text) as it comes. Raises `ConfigError` for a prompt that is empty, too long
        or holds unknown token ids, before anything is computed.
        """
        run = self.start(prompts, options, on_text=on_text, **fields)
        while not run.is_done:
            run.advance()
        return run.answers()

    def stream(
        self, prompt: Prompt, options: SamplingOptions | None = None, **fields: Any
    ) -> Iterator[str]:
        """Yield the answer to one prompt in pieces, as they come."""
        pieces: list[str] = []
        run = self.start([prompt], options, on_text=lambda _, piece: pieces.append(piece), **fields)
        while not run.is_done:
            run.advance()
            yield from pieces
            pieces.clear()

    def start(
        self,
        prompts: Prompt | Sequence[Prompt],
        options: SamplingOptions | None = None,
        *,
        on_text: TextListener | None = None,
        **fields: Any,
    ) -> Run:
        """Check the prompts and return their run, of which nothing has been computed yet."""
        options = _merged(options, fields)
        if options.stop and self.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer; pass one to Generator")
        ids = [self._encode(prompt) for prompt in _as_list(prompts)]
        if not ids:
            raise ConfigError("there is no prompt; give one or several")
        room = min(self.room(prompt, row) for row, prompt in enumerate(ids))
        return Run(
            self.rows(ids, min(options.max_new_tokens, room)),
            ids,
            dataclasses.replace(options, max_new_tokens=min(options.max_new_tokens, room)),
            options.rule(self.model.generation_config),
            end_of_sequence_ids(self.model),
            self.tokenizer,
            on_text or (lambda _row, _piece: None),
        )

    def rows(self, prompts: list[list[int]], max_new_tokens: int) -> Rows:
        """Return the rows of checked prompts, on the faster of the two ways that serves the model.

        As many prompts as last time continue the last ones, as far as they are equal. The first
        call of a generator tries a few tokens both ways.
        """
        if (adapters := adapter_state(self.model)) != self._adapters:
            self._adapters, self._last, self._last_on_gpu = adapters, None, None
        if self.model.device.type == "cuda":
            return self._rows_on_gpu(prompts, max_new_tokens)
        if not self._has_tried_rows:
            self.why_padded = try_rows(self.model, self._threads, prompts[0])
            self._has_tried_rows = True
        if self.why_padded is not None:
            return PaddedRows(self.model, prompts, self._pad_id())
        if self._last is not None and self._last.num_rows == len(prompts):
            self._last.continue_with(prompts)
        else:
            self._last = CachedRows(
                self.model, self._threads, prompts, max_new_tokens, has_replay=self._has_replay,
                kv_dtype=self._kv_dtype,
            )  # fmt: skip
        return self._last

    def _rows_on_gpu(self, prompts: list[list[int]], max_new_tokens: int) -> Rows:
        """The same on a GPU, where a step is captured pieces."""
        if not self._has_tried_rows:
            self.why_padded = try_cuda_rows(self.model, prompts[0])
            self._has_tried_rows = True
        if self.why_padded is not None:
            return PaddedRows(self.model, prompts, self._pad_id())
        if self._last_on_gpu is not None and self._last_on_gpu.num_rows == len(prompts):
            self._last_on_gpu.continue_with(prompts)
        else:
            self._last_on_gpu = new_cuda_rows(
                self.model, prompts, max_new_tokens, has_replay=self._has_replay
            )
        return self._last_on_gpu

    @property
    def why_slower(self) -> str | None:
        """Why decode steps run the model's own code, as one sentence; None: they do not."""
        if self.why_padded is not None:
            return f"steps run padded, on Transformers' own caches: {self.why_padded}"
        rows = self._last or self._last_on_gpu
        if rows is not None and self._has_replay and rows.step.why_not is not None:
            return f"decode steps are not replayed: {rows.step.why_not}"
        return None

    @property
    def recorded_graph(self) -> RecordedGraph | None:
        """The graph of the last decode steps; None if they were not replayed, or on a GPU."""
        return self._last.step.recorded if self._last is not None else None

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, Tensor):
            return [int(token) for token in prompt.flatten().tolist()]
        if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
            return list(prompt)  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise ConfigError("a prompt of text needs a tokenizer; pass one to Generator")
        if isinstance(prompt, str):
            return encode_text(self.tokenizer, prompt)
        ids: list[int] = encode_conversation(self.tokenizer, prompt).flatten().tolist()  # type: ignore[arg-type]
        return ids

    def room(self, prompt: list[int], row: int = 0) -> int:
        """Check a prompt; return how many tokens the context has left for its answer.

        Raises `ConfigError`, which names the prompt by its row.
        """
        if not prompt:
            raise ConfigError(f"prompt {row} is empty; give some text or at least one token")
        size = vocabulary_size(self.model)
        unknown = next((token for token in prompt if not 0 <= token < size), None)
        if unknown is not None:
            raise ConfigError(
                f"prompt {row} holds token id {unknown}, but the model knows 0 to {size - 1}; "
                "use the tokenizer that belongs to the model"
            )
        longest = context_tokens(self.model)
        if longest is None:
            return 1 << 62
        if len(prompt) >= longest:
            raise ConfigError(
                f"the prompt has {len(prompt)} tokens and the model's context is {longest}; "
                "shorten the prompt"
            )
        return longest - len(prompt)

    def slot_pool(self, num_rows: int) -> BorrowedSlots:
        """Return rows that requests can borrow; one if the model must run padded."""
        is_on_gpu = self.model.device.type == "cuda"
        if not self._has_tried_rows:
            trial = [self._pad_id()]
            self.why_padded = (
                try_cuda_rows(self.model, trial)
                if is_on_gpu
                else try_rows(self.model, self._threads, trial)
            )
            self._has_tried_rows = True
        if self.why_padded is not None:
            return LoneRow(
                lambda prompt: self.rows([prompt], _LONE_ANSWER_TOKENS), self._all_logits
            )
        if is_on_gpu:
            return new_cuda_slot_pool(self.model, num_rows, has_replay=self._has_replay)
        return SlotPool(
            self.model, self._threads, num_rows, has_replay=self._has_replay,
            kv_dtype=self._kv_dtype,
        )  # fmt: skip

    @torch.inference_mode()
    def _all_logits(self, prompt: list[int]) -> Tensor:
        """Run a prompt by itself; return the logits after each token: (n_tokens, vocabulary)."""
        ids = torch.tensor([prompt], device=self.model.device)
        logits: Tensor = self.model(input_ids=ids, use_cache=False, return_dict=True).logits[0]
        return logits

    def _pad_id(self) -> int:
        pad = self.model.generation_config.pad_token_id
        if pad is None and self.tokenizer is not None:
            pad = self.tokenizer.pad_token_id
        return pad if pad is not None else 0  # its positions are masked


def _threads_of(model: Any) -> CpuThreads:
    """Return the threads of a model that Tandem loaded; start some for another."""
    runtime = runtime_of(model)
    if runtime is not None:
        return runtime.threads
    return CpuThreads(num_threads=detect_cpu().physical_cores)


def _merged(options: SamplingOptions | None, fields: dict[str, Any]) -> SamplingOptions:
    given = {} if options is None else dataclasses.asdict(options)
    if "stop" in fields:
        stop = fields["stop"]
        fields["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return from_mapping(SamplingOptions, {**given, **fields}, where="generate")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt from several: a list of ids or of messages is one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Tensor):
        return list(prompts) if prompts.dim() == 2 else [prompts]
    is_one = len(prompts) > 0 and all(isinstance(part, int | dict) for part in prompts)
    return [prompts] if is_one else list(prompts)  # type: ignore[list-item, arg-type]
