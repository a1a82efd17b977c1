"""Runs a model's forward on one of Tandem's KV caches, and finds the model's executor."""

import inspect
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor, nn

from tandem.decode.mtp.streams import num_streams
from tandem.decode.substitutions.prompt_operations import PromptOperations
from tandem.decode.substitutions.shallow_copy import ShallowCopy
from tandem.experts.execution.executor import Executor
from tandem.experts.store.packed_layer import PackedLayer
from tandem.foreign_types import ImageFeatures, ModelPart, PreTrainedModel
from tandem.hf.compat import (
    cache_argument,
    forget_positions,
    given_features,
    takes_logits_to_keep,
)
from tandem.hf.packed_layers import PackedLinear
from tandem.hf.runtime import runtime_of
from tandem.kernels.dense import CpuThreads
from tandem.kernels.torch_private import own_forward_hooks
from tandem.kv_cache.base import SlotCache, stepping
from tandem.kv_cache.indexers import masks_by_layer_type
from tandem.kv_cache.stand_ins import transformers_cache


class ModelRunner:
    """Runs a model's forwards, which read and write one of Tandem's KV caches."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: SlotCache,
        threads: CpuThreads | None = None,
        *,
        notes_hidden: bool = False,
    ) -> None:
        """Take a model and its KV cache.

        With `threads`, prompts run Tandem's native operations. With `notes_hidden`, forwards set
        `hidden`. Raises `NotInSlotsError` if the model's layers keep data of tokens that the KV
        cache cannot hold.
        """
        self.hidden: Tensor | None = None
        """The output head's input in the latest forward, (b, n_tokens, width).

        None without `notes_hidden`. In a model with several residual streams, it holds all streams
        before they are mixed.
        """
        self._notes_hidden = notes_hidden
        self._noted: nn.Module | None = None
        self.model = model
        self._cache = cache
        self._operations = None if threads is None else PromptOperations(threads)
        self._copy = ShallowCopy(model)
        self._shell = transformers_cache(model, cache)
        self._takes_rows = _looks_for_embeddings(model)
        self._cache_argument = cache_argument(model)
        self.keeps_logits = takes_logits_to_keep(model)
        """Whether the model can compute logits for selected tokens only."""

    @property
    def executor(self) -> Executor | None:
        """The object that currently computes the experts; None if Tandem did not load the model."""
        return executor_of(self.model)

    def why_not_replayed(
        self, tolerances: Mapping[torch.dtype, float], *, has_replay: bool
    ) -> str | None:
        """Return why decode steps must run the model's own code; None: they can be replayed.

        `has_replay` tells whether replay is enabled. `tolerances` has the permitted deviation of
        replayed logits for each dtype of a model whose steps can be replayed.
        """
        if not has_replay:
            return "replay is disabled (has_replay=False)"
        dtype = self.model.dtype
        return None if dtype in tolerances else f"the model is {dtype}"

    def logits(
        self,
        ids: Tensor,
        positions: Tensor,
        keep: Tensor | int | None = None,
        features: ImageFeatures | None = None,
        *,
        is_prompt: bool = False,
    ) -> Tensor:
        """Return the logits (b, n_tokens, vocabulary) of ids (b, n_tokens) at their positions.

        Positions are (b, n_tokens), or (kinds, b, n_tokens) for images with several kinds of
        positions. `keep` selects the tokens whose logits are returned; it is ignored unless
        `keeps_logits`. `features` are those of the image tokens among the ids
        (`SlotImages.place`). Native operations take the place of torch's only with `is_prompt`:
        other forwards may be recorded.
        """
        is_kept = keep is not None and self.keeps_logits
        native = self._operations if is_prompt else None
        forget_positions(self._shell)
        copy = self._copy.model
        masks = masks_by_layer_type(self.model, self._shell.layers)
        if self._notes_hidden:
            self._note_hidden(_before_head(copy))
        has_rows = self._takes_rows and features is None
        rows = {"inputs_embeds": copy.get_input_embeddings()(ids)} if has_rows else {}
        with (
            stepping(self._cache),
            given_features(copy, features) as images,
            native or nullcontext(),
        ):
            outputs = copy(
                position_ids=positions,
                use_cache=True,
                return_dict=True,
                **(rows or {"input_ids": ids}),
                **{self._cache_argument: self._shell},
                **({"attention_mask": masks} if masks else {}),
                **images,
                **({"logits_to_keep": keep} if is_kept else {}),
            )
        logits: Tensor = outputs.logits
        return logits

    def room_for_hidden(self, num_tokens: int) -> Tensor | None:
        """Return zeros (n_tokens, width), a tensor to which decode steps can copy `hidden`.

        None without `notes_hidden`.
        """
        if not self._notes_hidden:
            return None
        config = self.model.config
        shape = num_tokens, num_streams(config) * config.get_text_config().hidden_size
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)

    def _note_hidden(self, decoder: nn.Module) -> None:
        """Hook `decoder`, the module before the output head, so that forwards set `hidden`."""
        if decoder is self._noted:
            return

        def note(module: object, args: object, outputs: ImageFeatures) -> None:
            self.hidden = outputs.last_hidden_state

        def note_streams(module: object, args: object, streams: Tensor) -> None:
            self.hidden = streams.flatten(2)

        has_streams = num_streams(self.model.config) > 1
        last = cast("ModelPart", decoder).layers[-1] if has_streams else decoder
        own_forward_hooks(last)  # so that the user's model does not get the hook
        last.register_forward_hook(note_streams if has_streams else note)
        self._noted = decoder


def _before_head(model: PreTrainedModel) -> nn.Module:
    """Return the module whose output is the last hidden state.

    For Llama 4, `get_decoder` returns a module with an output head; the result is then the decoder
    inside that module.
    """
    decoder: ModelPart = model.get_decoder()
    return decoder.model if hasattr(decoder, "lm_head") else decoder


def _looks_for_embeddings(model: nn.Module) -> bool:
    """Tell whether a model's code moves token ids to the embedding's device (Llama 4).

    If the embedding is on the host, a captured step cannot run that code. Such a model therefore
    gets the embedding's rows instead of ids.
    """
    forwards = {
        inspect.unwrap(vars(kind)["forward"])
        for kind in {type(module) for module in model.modules()}
        if "forward" in vars(kind)
    }
    names = {"embed_tokens", "weight", "device"}
    return any(names <= set(forward.__code__.co_names) for forward in forwards)


def executor_of(model: PreTrainedModel) -> Executor | None:
    """Return the object that computes a model's experts; None if Tandem did not load the model."""
    runtime = runtime_of(model)
    return None if runtime is None else runtime.executor


def tolerance_of(model: PreTrainedModel, tolerances: Mapping[torch.dtype, float]) -> float | None:
    """Return how far another implementation of a step may deviate, relative to its logits' size.

    `tolerances` maps dtypes to deviations; the result is None if the model's dtype is missing.
    Packed layers round their inputs as bf16 does, so models with packed layers get at least bf16's
    deviation.
    """
    tolerance = tolerances.get(model.dtype)
    if tolerance is None or not _has_packed_weights(model):
        return tolerance
    return max(tolerance, tolerances[torch.bfloat16])


def _has_packed_weights(model: PreTrainedModel) -> bool:
    runtime = runtime_of(model)
    experts: Iterable[object] = () if runtime is None else runtime.store
    return any(isinstance(layer, PackedLayer) for layer in experts) or any(
        isinstance(module, PackedLinear) for module in model.modules()
    )
