"""Prepares and runs each forward as Transformers' `generate` does, for Tandem's decode loop.

This module handles the tensors of a step; sampling and text are handled elsewhere.
"""

import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from tandem.core.errors import ConfigError
from tandem.decode.finite_logits import require_finite_logits
from tandem.decode.images import ImagePrompt
from tandem.decode.slots import SlotPool
from tandem.foreign_types import PreTrainedModel
from tandem.hf.compat import (
    cache_argument,
    first_position_ids,
    has_dynamic_cache,
    next_step_kwargs,
    takes_logits_to_keep,
)


class PaddedBatch:
    """The sequences of one batch, padded on the left, on the model's own KV caches and states.

    This serves every architecture: positions, masks and inputs come from the model's own
    preparation, exactly as in `generate`. The whole prompt is one forward.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: list[list[int]],
        pad_id: int,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Take the prompts as token ids; no prompt may be empty. Nothing is computed yet.

        `inputs` are further inputs of the model's `generate`, such as the pixels of images.
        """
        self._model = model
        width = max(map(len, prompts))
        padded = [[pad_id] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        self._ids = torch.tensor(padded, device=model.device)  # (batch, n_tokens)
        self._kwargs: dict[str, object] = {
            "attention_mask": torch.tensor(mask, device=model.device), "use_cache": True,
            **{name: value.to(model.device) for name, value in (inputs or {}).items()},
        }  # fmt: skip
        if "position_ids" in inspect.signature(model.forward).parameters:
            self._kwargs["position_ids"] = first_position_ids(model, self._ids, self._kwargs)
        if len(set(map(len, prompts))) == 1:  # a mask of ones only costs time
            self._kwargs["attention_mask"] = None
        if takes_logits_to_keep(model):
            self._kwargs["logits_to_keep"] = 1
        if has_dynamic_cache(model):
            config = model.config.get_text_config(decoder=True)
            self._kwargs[cache_argument(model)] = DynamicCache(config=config)

    def prefill(self) -> Tensor:
        """Run the prompts; return the logits of each sequence's next token: (batch, vocabulary)."""
        return self._forward(self._ids, is_first=True)

    def decode(self, tokens: list[int]) -> Tensor:
        """Append one token per sequence; return the logits of the next: (batch, vocabulary)."""
        new = torch.tensor(tokens, device=self._ids.device)[:, None]
        self._ids = torch.cat([self._ids, new], -1)
        return self._forward(self._ids, is_first=False)

    @torch.inference_mode()
    def _forward(self, input_ids: Tensor, *, is_first: bool) -> Tensor:
        inputs = self._model.prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=None if is_first else 1,
            is_first_iteration=is_first,
            **self._kwargs,
        )
        outputs = self._model(**inputs, return_dict=True)
        self._kwargs = next_step_kwargs(self._model, outputs, self._kwargs)
        logits: Tensor = outputs.logits[:, -1]
        require_finite_logits(self._model, logits, lambda sequence: self._ids[sequence].tolist())
        return logits


class PaddedSlotPool(SlotPool):
    """Slots whose prompts start together, on the model's own KV caches.

    This pool is for models that no other pool serves.
    """

    why_no_drafts = "steps run padded, on Transformers' own caches"

    def __init__(self, model: PreTrainedModel, num_slots: int, pad_id: int) -> None:
        """Serve `num_slots` prompts at a time; `pad_id` pads shorter prompts on the left."""
        self.num_slots = num_slots
        self._model, self._pad_id = model, pad_id
        self._padded: PaddedBatch | None = None
        self._images: dict[int, ImagePrompt] = {}
        self._tokens: dict[int, int] = {}  # slot -> last token, in the order of the batch

    def show(self, slot: int, images: ImagePrompt | None) -> None:
        """Set the images of the slot's next prompt; None: it has no images.

        Raises `ConfigError` for images if the pool has several slots.
        """
        if images is not None and self.num_slots > 1:
            raise ConfigError(
                f"{self.num_slots} prompts are padded together, of which one has images; "
                "give it by itself"
            )
        self._images = {} if images is None else {slot: images}

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> Tensor:
        """Empty all slots and run whole prompts; return the logits after each prompt.

        The logits are (slots, vocabulary), in the order of `prompts`.
        """
        inputs: dict[str, Tensor] = {}
        for images in self._images.values():
            prompts, inputs = dict.fromkeys(prompts, images.ids), images.tensors()
        sequences = [list(prompt) for prompt in prompts.values()]
        self._padded = PaddedBatch(self._model, sequences, self._pad_id, inputs)
        self._tokens = dict.fromkeys(prompts, 0)
        return self._padded.prefill()

    @torch.inference_mode()
    def prefill_with_logits(self, slot: int, tokens: Sequence[int]) -> Tensor:
        """Run a whole prompt twice and return the logits after each token: (n_tokens, vocabulary).

        The first run computes all logits and keeps no KV cache. The second one computes only the
        last token's logits, and later steps continue from its KV cache.
        """
        ids = torch.tensor([list(tokens)], device=self._model.device)
        logits = self._model(input_ids=ids, use_cache=False, return_dict=True).logits[0]
        return torch.cat([logits[:-1], self.prefill({slot: tokens})])

    def verify(self, tokens: Mapping[int, Sequence[int]]) -> Tensor:
        """Append one token to each given slot; return the logits after it, (slots, vocabulary).

        A step computes the whole batch, so a slot that is not given gets its last token once more.
        """
        assert self._padded is not None, "decode before prefill"
        self._tokens |= {slot: token for slot, (token,) in tokens.items()}
        logits = self._padded.decode(list(self._tokens.values()))
        order = list(self._tokens)
        return logits[[order.index(slot) for slot in tokens]]
