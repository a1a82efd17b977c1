"""Chunked attention (Llama 4): a token sees only earlier tokens in its own chunk of positions.

Transformers' caches treat such layers like layers with a sliding window; only the masks differ.
"""

from typing import NamedTuple

from tandem.checkpoint.config_values import value_of
from tandem.foreign_types import PreTrainedConfig

CHUNKED = "chunked_attention"


class SeesOwnChunk(NamedTuple):
    """Stands for a mask where every token sees itself and the earlier tokens of its chunk."""

    size: int
    """Positions of a chunk."""


def chunked_layers(config: PreTrainedConfig) -> set[int]:
    """Return the numbers of the layers with chunked attention."""
    kinds = value_of(config, "layer_types") or []
    return {number for number, kind in enumerate(kinds) if kind == CHUNKED}
