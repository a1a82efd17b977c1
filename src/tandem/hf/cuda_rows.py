"""Steps rows on a GPU: prompts in chunks, decode steps from captured pieces.

For the same models as `CachedRows`; whether one is among them is found by trying.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tandem.core.errors import TandemError
from tandem.hf.attention import AttentionSwitch
from tandem.hf.cuda_graphs import Capture, CudaCapture, GraphedStep, Uncut
from tandem.hf.cuda_kv_cache import StaticKvCache, on_its_way
from tandem.hf.kv_cache import NotByRowsError, stepping, transformers_cache
from tandem.hf.rows import num_shared
from tandem.hf.stepping import PaddedRows
from tandem.kernels.attention import Segment
from tandem.offload.cuda import CudaDevice
from tandem.offload.expert_cache import SHRINK
from tandem.offload.passing_executor import PassingExecutor

# Bounds the activations of a long prompt; fetched experts serve this many tokens.
MAX_STEP_TOKENS = 2048
_TRIAL_TOKENS = 6
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}


class CudaRows:
    """Rows of one batch, on a KV cache that stays where it is."""

    def __init__(
        self,
        model: Any,
        prompts: list[list[int]],
        max_new_tokens: int,
        *,
        make_capture: Callable[[], Capture] | None = None,
    ) -> None:
        """Take the prompts as token ids, none empty; without `make_capture` steps run as they are.

        Raises `NotByRowsError` for a model that keeps more than keys and values.
        """
        self._model = model
        self._switch = AttentionSwitch(model)
        self._prompts = list(prompts)
        self._tokens: list[list[int]] = [[] for _ in prompts]  # what the cache holds
        self.reused_tokens = [0] * len(prompts)
        """Per row, what the cache held of its prompt."""
        self._capacity = max(map(len, prompts)) + min(max_new_tokens, MAX_STEP_TOKENS)
        self._keeps_logits = bool(model._supports_logits_to_keep())
        self._make_capture = make_capture
        with torch.inference_mode(False):
            self._ids = torch.zeros((len(prompts), 1), dtype=torch.int64, device=model.device)
        self._steps: dict[int, GraphedStep] = {}  # by reach, of one generation of the cache
        self._generation = 0
        self._captured_for: Any = None
        self._captured_engine: Any = None  # another one: the slots are other memory
        self._new_cache()

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return len(self._prompts)

    @property
    def step(self) -> GraphedStep:
        """The decode step at the present reach."""
        return self._step_at(self.cache.reach)

    def continue_with(self, prompts: list[list[int]]) -> None:
        """Take other prompts, as many; what a row shares with what it holds stays."""
        assert len(prompts) == len(self._prompts)
        self._prompts = list(prompts)
        for row, (held, prompt) in enumerate(zip(self._tokens, prompts, strict=True)):
            shared = num_shared(held, prompt)
            self.cache.lengths[row] = self.reused_tokens[row] = shared
            del held[shared:]

    def pretend(self, depth: int) -> None:
        """Let every row hold `depth` random tokens before its prompt, to time what follows."""
        prompts = self._prompts
        self._capacity += depth
        self._new_cache()
        self._prompts = [[0]] * len(prompts)
        self.prefill()  # makes the KV cache's layers
        self.cache.pretend(depth)
        self._tokens = [[-1] * depth for _ in prompts]
        self._prompts = [[-1] * depth + prompt for prompt in prompts]

    @torch.inference_mode()
    def prefill(self) -> Tensor:
        """Run the prompts; return the logits of each row's next token: (rows, vocabulary)."""
        logits = []
        for row, prompt in enumerate(self._prompts):
            first = self.cache.lengths[row]
            for start in range(first, len(prompt), MAX_STEP_TOKENS):
                piece = prompt[start : start + MAX_STEP_TOKENS]
                self.cache.begin(Segment(row, start, len(piece)))
                ids = torch.tensor([piece], device=self._model.device)
                places = torch.arange(start, start + len(piece), device=self._model.device)[None]
                last = self._run_model(ids, places)[0, -1]
                self.cache.commit()
                self._tokens[row] += piece
            logits.append(last)
        return torch.stack(logits)

    @torch.inference_mode()
    def decode(self, tokens: list[int]) -> Tensor:
        """Append one token per row; return the logits of the next: (rows, vocabulary)."""
        self.cache.begin_decode()
        self._ids.copy_(on_its_way(tokens, self._model.device)[:, None], non_blocking=True)
        self._follow_executor()
        step = self.step
        if step.is_replaying:  # the model's own forward would announce itself
            self._announce(tokens)
        logits = step()
        self.cache.commit()
        for held, token in zip(self._tokens, tokens, strict=True):
            held.append(token)
        return logits

    def _new_cache(self) -> None:
        self.cache = StaticKvCache(
            len(self._prompts), self._capacity, self._model.device, self._make_room
        )
        # It has what the shell asks of a cache, and is no `KvCache`.
        self._shell = transformers_cache(self._model, self.cache)  # type: ignore[arg-type]
        self._tokens = [[] for _ in self._prompts]
        self._steps.clear()
        self._generation = 0

    def _follow_executor(self) -> None:
        """Drop what was captured for another executor, and capture nothing for some."""
        executor = self._executor()
        engine = getattr(getattr(executor, "cache", None), "engine", None)
        if executor is not self._captured_for or engine is not self._captured_engine:
            self._captured_for, self._captured_engine = executor, engine
            self._steps.clear()

    def _uncut(self) -> Uncut | None:
        """Return what computes layers inside a piece, where all experts are resident.

        Not behind executors that pass calls on: these may change the router's choice.
        """
        device = getattr(self._captured_for, "device", None)
        if not isinstance(device, CudaDevice):
            return None
        layers = device.resident(self._captured_for.cache)
        if layers is None or not layers.is_whole():
            return None
        layers.prepare(self.num_rows)

        def compute(layer: int, hidden: Tensor, *args: Any) -> Tensor | None:
            is_served = layers.serves(layer, args[-1], len(hidden))
            return layers.execute(layer, hidden, *args) if is_served else None

        return compute

    def _step_at(self, reach: int) -> GraphedStep:
        if self._generation != self.cache.generation:
            self._generation = self.cache.generation
            self._steps.clear()
        if reach not in self._steps:
            self._steps[reach] = GraphedStep(
                self._decode_step, self._model.dtype, self._make_capture, self._uncut
            )
        return self._steps[reach]

    def _decode_step(self) -> Tensor:
        logits: Tensor = self._run_model(self._ids, self.cache.positions[:, None])[:, -1]
        return logits

    def _run_model(self, ids: Tensor, positions: Tensor) -> Tensor:
        with self._switch.on(), stepping(self.cache):  # type: ignore[arg-type]
            outputs = self._model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=self._shell,
                use_cache=True,
                return_dict=True,
                **({"logits_to_keep": 1} if self._keeps_logits else {}),
            )
        logits: Tensor = outputs.logits
        return logits

    def _executor(self) -> Any:
        return getattr(getattr(self._model, "hf_quantizer", None), "executor", None)

    def _announce(self, tokens: list[int]) -> None:
        executor = self._executor()
        if executor is not None:
            executor.begin_step(tokens, is_prefill=False)

    def _make_room(self) -> bool:
        """Give some of the expert cache's memory to the KV cache."""
        cache = getattr(innermost(self._executor()), "cache", None)
        if cache is None or cache.num_slots == 0:
            return False
        cache.resize(int(cache.num_slots * SHRINK))
        return True


def innermost(executor: Any) -> Any:
    """Return what computes the experts, behind those that only pass calls on."""
    while isinstance(executor, PassingExecutor):
        executor = executor.inner
    return executor


def new_cuda_rows(
    model: Any, prompts: list[list[int]], max_new_tokens: int, *, has_replay: bool
) -> CudaRows:
    """Return rows on the model's GPU, with captured steps if they are wanted."""
    if not has_replay:
        return CudaRows(model, prompts, max_new_tokens)
    return CudaRows(model, prompts, max_new_tokens, make_capture=lambda: CudaCapture(model.device))


def try_cuda_rows(model: Any, prompt: list[int]) -> str | None:
    """Step a few tokens both ways; return why `CudaRows` does not serve a model, or None."""
    if model.dtype not in _TOLERANCES:
        return f"the model is {model.dtype}"
    trial = (prompt * _TRIAL_TOKENS)[:_TRIAL_TOKENS]
    prompts = [trial, trial[:2]]
    try:
        rows = CudaRows(model, prompts, 2)
        ours = [rows.prefill(), rows.decode(trial[:2])]
    except TandemError:
        raise
    except (
        NotByRowsError,
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        IndexError,
    ) as error:
        return str(error).partition("\n")[0] or type(error).__name__
    padded = PaddedRows(model, prompts, 0)
    theirs = [padded.prefill(), padded.decode(trial[:2])]
    tolerance = _TOLERANCES[model.dtype]
    for a, b in zip(ours, theirs, strict=True):
        if not (a.float() - b.float()).norm() <= tolerance * b.float().norm():
            return "its logits differ"
    return None
