"""Attention in chunks (Llama 4): a token sees what is before it in its own chunk of positions.

Transformers' caches keep such layers like those with a window, and a mask alone tells them apart.
"""

from typing import NamedTuple

from tandem.checkpoint.config_values import value_of
from tandem.foreign_types import PreTrainedConfig

CHUNKED = "chunked_attention"


class SeesOwnChunk(NamedTuple):
    """Stands for a mask where every token sees what is before it in its chunk."""

    size: int
    """Positions of one."""


def chunked_layers(config: PreTrainedConfig) -> set[int]:
    """Return the numbers of the layers that attend in chunks."""
    kinds = value_of(config, "layer_types") or []
    return {number for number, kind in enumerate(kinds) if kind == CHUNKED}
