"""Configurations by a seed: a shape with few layers, formats, a context, sequences, memory."""

import random
from dataclasses import dataclass

from tandem.bench.model_shapes import MODEL_SHAPES, ModelShape

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
# Of what the plan says that a model takes; None: all that the machine has.
_MEMORY_SHARES = (None, None, 0.85, 1.02, 1.1, 1.3)
_DEVICE_SHARES = (0.2, 0.5, 1.5)  # of the experts' bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What is planned and then done."""

    number: int
    shape: str
    num_layers: int
    num_experts: int
    vocabulary: int
    is_narrow: bool
    expert_dtype: str
    stored_dense_dtype: str
    """How the files have linear layers; as they are, or packed."""
    dense_dtype: str
    """How the load packs those that are not."""
    context: int
    sequences: int
    device_share: float | None
    """Memory of an emulated device, of the experts' bytes; None: no device."""
    memory_share: float | None
    """Memory of the processes' control group, of what the plan says; None: no group."""

    @property
    def text(self) -> str:
        """One line for people."""
        device = "" if self.device_share is None else f", device {self.device_share:.0%}"
        memory = "" if self.memory_share is None else f", memory {self.memory_share:.0%}"
        return (
            f"{self.shape}, {self.num_layers} layers of {self.num_experts} experts in "
            f"{self.expert_dtype}, linear layers {self.stored_dense_dtype}/{self.dense_dtype}, "
            f"{self.sequences} x {self.context} tokens{device}{memory}"
        )

    def model_shape(self) -> ModelShape:
        """Return the shape with these layers, experts and tokens."""
        shape = MODEL_SHAPES[self.shape]
        if self.num_layers < shape.values["num_hidden_layers"]:
            shape = shape.sample(self.num_layers)
        values = shape.values | {"vocab_size": self.vocabulary}
        for key in _EXPERT_KEYS:
            if key in values:
                values[key] = self.num_experts
        if self.is_narrow:
            values |= {name: _narrowed(values[name]) for name in _WIDTHS if name in values}
        return ModelShape(shape.model_type, values, shape.whole)


def draw(seed: int, count: int, *, is_narrow: bool = False, num_whole: int = 0) -> list[
    Configuration
]:  # fmt: skip
    """Return so many configurations, always the same for a seed; the last ones have all layers."""
    source = random.Random(seed)
    found = [_draw(source, number, is_narrow=is_narrow) for number in range(count - num_whole)]
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


def _narrowed(width: int) -> int:
    """Return an eighth of a width, in whole blocks of every format."""
    return max(_LEAST_WIDTH, -(-width // _NARROW // _LEAST_WIDTH) * _LEAST_WIDTH)
