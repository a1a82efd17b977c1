"""Random configurations: a shape with few layers, formats, a context, sequences, memory."""

import math
import random
from dataclasses import dataclass, replace
from typing import Any

from tandem.bench.model_shapes import DENSE_SHAPES, MODEL_SHAPES, ModelShape

_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
# Widths that a narrow model has an eighth of; what is cut into heads stays.
_WIDTHS = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
)
_NARROW, _LEAST_WIDTH = 8, 128
_EXPERT_DTYPES = ("int4", "int8", "mxfp4", "bf16")
_DENSE_DTYPES = ("auto", "none", "int4")
_CONTEXTS = (512, 1024, 2560)  # slots grow by 256 tokens
_NARROW_CONTEXTS = (256,)
_SEQUENCES = (1, 1, 2, 4)
# Share of the planned memory; None: all of the machine's.
_MEMORY_SHARES = (None, None, 0.85, 1.02, 1.1, 1.3)
_DEVICE_SHARES = (0.2, 0.5, 1.5)  # of the experts' bytes
# Additional features: a draft model, images, a GGUF file, a memory for experts on the disk.
_MORE = ("", "", "", "draft", "images", "gguf", "disk")
_IMAGE_SHAPE, _IMAGE_WHOLE = "qwen3.6-35b-a3b", "qwen3_5_moe"
_IMAGE_SIDES = (12, 24, 40)  # of a square image, in tokens
_NARROW_IMAGE_SIDE = 6
_TOWER_LAYERS = 3
_IMAGE_TOKEN = 20
_GGUF_SHAPES = (
    *("qwen3-30b-a3b", "qwen3.6-35b-a3b", "qwen3-next-80b-a3b", "gemma4-26b-a4b"),
    *("lfm2-8b-a1b", "nemotron-3-nano"),
)
_GGUF_TYPES = ("Q4_0", "Q5_0", "Q8_0")  # that need no library of llama.cpp's to be written
_EXPERT_MEMORY_SHARES = (0.5, 0.75)
_DRAFT_LAYERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A configuration that is planned and then run."""

    number: int
    shape: str
    num_layers: int
    num_experts: int
    vocabulary: int
    is_narrow: bool
    expert_dtype: str
    stored_dense_dtype: str
    """The format of linear layers in the files: "none", or a packed one."""
    dense_dtype: str
    """The format in which the load packs linear layers that are not packed yet."""
    context: int
    sequences: int
    device_share: float | None
    """Memory of an emulated device, relative to the experts' bytes; None: no device."""
    memory_share: float | None
    """Limit of the processes' control group, relative to the planned memory; None: no group."""
    gguf_type: str | None = None
    """The block type of a GGUF file; None: a packed model."""
    has_draft: bool = False
    """Whether a draft model is used."""
    image_side: int = 0
    """Side of a square image in each prompt, in tokens; 0: no image."""
    expert_memory_share: float | None = None
    """Memory for experts on the disk, relative to the experts' bytes; None: all are in memory."""

    @property
    def text(self) -> str:
        """One line of text about it."""
        device = "" if self.device_share is None else f", device {self.device_share:.0%}"
        memory = "" if self.memory_share is None else f", memory {self.memory_share:.0%}"
        formats = (
            f"{self.expert_dtype}, linear layers {self.stored_dense_dtype}/{self.dense_dtype}"
            if self.gguf_type is None
            else f"GGUF's {self.gguf_type}"
        )
        over = self.expert_memory_share
        more = ", drafted" * self.has_draft
        more += f", image {self.image_side} x {self.image_side}" * bool(self.image_side)
        more += "" if over is None else f", {over:.0%} of the experts in memory"
        return (
            f"{self.shape}, {self.num_layers} layers of {self.num_experts} experts in {formats}, "
            f"{self.sequences} x {self.context} tokens{device}{memory}{more}"
        )

    @property
    def image_tokens(self) -> int:
        """The tokens of a prompt's image."""
        return self.image_side**2

    def model_shape(self) -> ModelShape:
        """Return the shape with these layers, experts and token ids."""
        shape = MODEL_SHAPES[self.shape]
        if self.num_layers < shape.values["num_hidden_layers"]:
            shape = shape.sample(self.num_layers)
        values = shape.values | {"vocab_size": self.vocabulary}
        for key in _EXPERT_KEYS:
            if key in values:
                values[key] = self.num_experts
        if self.is_narrow:
            values |= {name: _narrowed(values[name]) for name in _WIDTHS if name in values}
        if self.image_side:
            return ModelShape(shape.model_type, values, _IMAGE_WHOLE, self._image_values(values))
        return ModelShape(shape.model_type, values, shape.whole)

    def _image_values(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return a model's config values about images, outside its text model."""
        tower: dict[str, Any] = {
            "model_type": _IMAGE_WHOLE, "depth": _TOWER_LAYERS,
            "out_hidden_size": values["hidden_size"],
        }  # fmt: skip
        if self.is_narrow:
            tower |= {"hidden_size": 128, "intermediate_size": 384, "num_heads": 4}
        return {
            "vision_config": tower, "image_token_id": _IMAGE_TOKEN,
            "video_token_id": _IMAGE_TOKEN + 1, "vision_start_token_id": _IMAGE_TOKEN + 2,
            "vision_end_token_id": _IMAGE_TOKEN + 3,
        }  # fmt: skip

    def draft_shape(self) -> ModelShape:
        """Return the draft model's shape."""
        shape = DENSE_SHAPES["qwen3-8b"].cut(_DRAFT_LAYERS)
        few = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": self.vocabulary}
        few |= (
            {"hidden_size": 256, "intermediate_size": 512}
            if self.is_narrow
            else {"hidden_size": 1024, "intermediate_size": 3072}
        )
        return ModelShape(shape.model_type, shape.values | few)


def draw(seed: int, count: int, *, is_narrow: bool = False, num_whole: int = 0) -> list[
    Configuration
]:  # fmt: skip
    """Return this many configurations, the same for a seed; the last ones have all layers."""
    source = random.Random(seed)
    # Additional features have a random source of their own, so that the rest stays the same.
    found = [
        _with_more(random.Random(f"{seed}/{number}"), _draw(source, number, is_narrow=is_narrow))
        for number in range(count - num_whole)
    ]
    return found + [
        _draw(source, number, is_narrow=is_narrow, is_whole=True)
        for number in range(count - num_whole, count)
    ]


def _draw(
    source: random.Random, number: int, *, is_narrow: bool, is_whole: bool = False
) -> Configuration:
    name = source.choice(sorted(MODEL_SHAPES))
    values = MODEL_SHAPES[name].values
    own = next(values[key] for key in _EXPERT_KEYS if key in values)
    # A run of layers with every kind: of dense ones first, of state spaces and attention.
    least = 4 if "layers_block_type" in values else 2
    few = source.choice((2, 3, 4))
    num_layers = max(few, least) + values.get("num_dense_layers", 0)
    on_device = source.random() < 1 / 3
    memory_share, stored = source.choice(_MEMORY_SHARES), source.choice(("none", "int8"))
    return Configuration(
        number=number,
        shape=name,
        num_layers=values["num_hidden_layers"] if is_whole else num_layers,
        num_experts=own if is_whole else min(own, source.choice((16, 32))),
        vocabulary=values["vocab_size"] if is_whole else source.choice((2_000, 32_000)),
        is_narrow=is_narrow,
        expert_dtype="int4" if is_whole else source.choice(_EXPERT_DTYPES),
        stored_dense_dtype=stored,
        dense_dtype=source.choice(_DENSE_DTYPES if stored == "none" else ("auto",)),
        context=source.choice(_NARROW_CONTEXTS if is_narrow else _CONTEXTS),
        sequences=source.choice(_SEQUENCES),
        device_share=source.choice(_DEVICE_SHARES) if on_device else None,
        memory_share=None if is_narrow or is_whole or on_device else memory_share,
    )


def _with_more(source: random.Random, one: Configuration) -> Configuration:
    """Return a configuration with an additional feature, or unchanged."""
    experts = min(one.num_experts, 32)
    match source.choice(_MORE):
        case "draft":
            return replace(one, has_draft=True)
        case "images":
            side = _NARROW_IMAGE_SIDE if one.is_narrow else source.choice(_IMAGE_SIDES)
            context = max(one.context, 512 + 256 * math.ceil(side**2 / 256)) * (not one.is_narrow)
            return replace(
                one, shape=_IMAGE_SHAPE, num_layers=4, num_experts=max(16, experts),
                image_side=side, context=context or one.context,
            )  # fmt: skip
        case "gguf":
            name = source.choice(_GGUF_SHAPES)
            values = MODEL_SHAPES[name].values
            return replace(
                one, shape=name, num_layers=4 + values.get("num_dense_layers", 0),
                num_experts=max(16, experts), gguf_type=source.choice(_GGUF_TYPES),
                expert_dtype="auto", stored_dense_dtype="none", dense_dtype="auto",
            )  # fmt: skip
        case "disk" if one.device_share is None:
            share = source.choice(_EXPERT_MEMORY_SHARES)
            return replace(
                one, num_layers=max(4, one.num_layers), expert_memory_share=share, memory_share=None
            )
        case _:
            return one


def _narrowed(width: int) -> int:
    """Return an eighth of a width, in whole blocks of every format."""
    return max(_LEAST_WIDTH, -(-width // _NARROW // _LEAST_WIDTH) * _LEAST_WIDTH)
