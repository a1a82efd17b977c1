"""Images in sequence slots: the features that the model's vision tower makes, token by token.

A processor writes a placeholder token for each feature of an image. A slot stores a negative number
instead, made from the image's content, so that prompts with different images share no prefix. The
model's own code merges the features into the embeddings; this module supplies the features.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.checkpoint.config_values import value_of
from tandem.core.errors import UnsupportedModelError
from tandem.foreign_types import ImageFeatures, PreTrainedModel
from tandem.hf.compat import image_features, image_positions, image_tower
from tandem.kernels.attention import Segment


@dataclass(frozen=True, slots=True, eq=False)
class ImagePrompt:
    """A prompt with images, as a model's processor wrote it."""

    ids: tuple[int, ...]
    keys: tuple[int, ...]
    """`ids` with a negative number for each image token; equal numbers mean equal images."""
    inputs: Mapping[str, "npt.NDArray[np.generic]"]
    """The processor's other outputs, by the model's argument names."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the inputs as tensors, in the form that the model accepts."""
        return {name: torch.from_numpy(value) for name, value in self.inputs.items()}


@dataclass(slots=True)
class _Shown:
    """One slot's images, and the features that the model has computed from them."""

    prompt: ImagePrompt
    positions: Tensor
    """The prompt's rotary positions, (kinds, n_tokens); kinds are e.g. time, height and width."""
    delta: int
    """For a token after the prompt, its rotary position minus its index in the slot."""
    is_image: Tensor
    """Whether each token belongs to an image: (n_tokens,) bool."""
    features: ImageFeatures | None = None

    def positions_of(self, segment: Segment) -> Tensor:
        """Return the rotary positions (kinds, n) of `segment`, inside the prompt or after it."""
        first, end = segment.first_position, segment.first_position + segment.num_tokens
        known = self.positions[:, first:end]
        later = torch.arange(first + known.shape[1], end, device="cpu") + self.delta
        return torch.cat([known, later.expand(len(known), -1)], 1)


class SlotImages:
    """The images in the slots of a pool."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Begin without images; `model` will compute the features of images that are shown."""
        self._model = model
        self._prompts: dict[int, ImagePrompt] = {}
        self._shown: dict[int, _Shown] = {}

    def show(self, slot: int, prompt: ImagePrompt | None) -> None:
        """Set the images of a slot's next prompt in place of its former images; None: no images."""
        self._prompts.pop(slot, None)
        self._shown.pop(slot, None)
        if prompt is not None:
            self._prompts[slot] = prompt

    def ids(self, keys: Sequence[int]) -> list[int]:
        """Return token ids for the keys of an `ImagePrompt`: the image token for negative keys."""
        return [key if key >= 0 else int(self._model.config.image_token_id) for key in keys]

    def deltas(self, slots: Sequence[int]) -> list[int] | None:
        """Return each slot's next rotary position minus its length; None: no slot has images."""
        if not self._shown:
            return None
        return [self._shown[slot].delta if slot in self._shown else 0 for slot in slots]

    def place(
        self, segments: Sequence[Segment], keys: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, ImageFeatures | None]:
        """Return ids (n_tokens,), positions (1, n) or (kinds, 1, n), and features, for a forward.

        `keys` and `positions` (n_tokens,) belong to the segments' tokens. The features are None if
        the segments contain no image tokens.
        """
        if not any(segment.slot in self._prompts for segment in segments):
            return keys, positions[None], None
        ids = keys.where(keys >= 0, self._model.config.image_token_id)
        shown = [self._shown_of(segment.slot) for segment in segments]
        kinds = max(len(one.positions) for one in shown if one)
        placed = [
            own.expand(kinds, -1) if one is None else one.positions_of(segment)
            for segment, own, one in zip(
                segments, positions.split([s.num_tokens for s in segments]), shown, strict=True
            )
        ]
        found = [
            self._features_of(segment, one)
            for segment, one in zip(segments, shown, strict=True)
            if one is not None
        ]
        parts = [part for part in found if part is not None]
        together = torch.cat(placed, 1)[:, None]  # (kinds, 1, n_tokens)
        features = _changed(parts, torch.cat) if parts else None
        return ids, together[0] if kinds == 1 else together, features

    def _shown_of(self, slot: int) -> _Shown | None:
        if slot not in self._prompts:
            return None
        if slot not in self._shown:
            prompt = self._prompts[slot]
            positions = image_positions(self._model, prompt.ids, prompt.tensors())
            delta = int(positions.max()) + 1 - len(prompt.ids)
            is_image = torch.tensor(prompt.keys, device="cpu") < 0
            self._shown[slot] = _Shown(prompt, positions, delta, is_image)
        return self._shown[slot]

    def _features_of(self, segment: Segment, shown: _Shown) -> ImageFeatures | None:
        """Return the features of a segment's image tokens; None if it has none.

        The vision tower runs at most once per prompt, and only when a segment has image tokens.
        """
        first, end = segment.first_position, segment.first_position + segment.num_tokens
        before, count = (
            int(shown.is_image[part].sum()) for part in (slice(first), slice(first, end))
        )
        if not count:
            return None
        if shown.features is None:
            shown.features = image_features(self._model, shown.prompt.tensors())
        return _changed([shown.features], lambda wholes: wholes[0][before : before + count])


def require_images(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModelError` for a model that takes no images."""
    if image_tower(model) is None or value_of(model.config, "image_token_id") is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} takes no images; leave them out, or take a vision-language "
            "model such as Qwen3.6-35B-A3B"
        )


def why_no_images(model: PreTrainedModel, *, is_padded: bool) -> str | None:
    """Return why requests with images are refused, as a sentence; None: they are accepted.

    With `is_padded`, prompts run as a `PaddedBatch` instead of in sequence slots.
    """
    try:
        require_images(model)
    except UnsupportedModelError as error:
        return str(error)
    why = None if is_padded else why_no_slot_images(model)
    return None if why is None else f"{type(model).__name__} takes no images here: {why}"


def why_no_slot_images(model: PreTrainedModel) -> str | None:
    """Return why sequence slots cannot hold a model's images; None: they can."""
    if model.device.type != "cpu":
        return "images are not read in sequence slots on a GPU"
    text = model.config.get_text_config()
    if value_of(text, "use_bidirectional_attention"):
        return "the tokens of an image see each other, later ones included"
    return None


def _changed(
    features: Sequence[ImageFeatures], change: Callable[[list[Tensor]], Tensor]
) -> ImageFeatures:
    """Apply `change` to each field of the features; return the results as one `ImageFeatures`.

    The fields are the vision tower's output and, in some models, the outputs of several of the
    tower's layers. `change` gets one tensor (image tokens, hidden size) for each of `features`.
    Depending on the model and the version of Transformers, a field is one such tensor or one per
    image.
    """

    def changed(parts: Sequence[Tensor | Sequence[Tensor]]) -> Tensor | tuple[Tensor]:
        wholes = [part if isinstance(part, Tensor) else torch.cat(tuple(part)) for part in parts]
        whole = change([rows.flatten(0, -2) for rows in wholes])
        return whole if isinstance(parts[0], Tensor) else (whole,)

    fields: dict[str, object] = {"pooler_output": changed([one.pooler_output for one in features])}
    depths = [one.get("deepstack_features") for one in features]
    if all(depths):
        fields["deepstack_features"] = [changed(parts) for parts in zip(*depths, strict=True)]
    return type(features[0])(**fields)
