"""Attention in chunks (Llama 4): a token sees what is before it in its own chunk of positions.

Transformers' caches keep such layers like those with a window, and a mask alone tells them apart.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.checkpoint.config_values import value_of
from tandem.foreign_types import PreTrainedConfig

CHUNKED = "chunked_attention"


class SeesOwnChunk:
    """Stands for a mask where every token sees its chunk: one object for one forward."""

    def __init__(self, size: int) -> None:
        """Chunks have so many positions."""
        self._size = size
        self._seen: list[Tensor | None] = []  # once a layer has asked

    def seen(self, select: Callable[[int], Tensor | None]) -> Tensor | None:
        """Return what `SlotCache.select_chunks` selects for the forward's tokens."""
        if not self._seen:
            self._seen.append(select(self._size))
        return self._seen[0]


def chunked_layers(config: PreTrainedConfig) -> set[int]:
    """Return the numbers of the layers that attend in chunks."""
    kinds = value_of(config, "layer_types") or []
    return {number for number, kind in enumerate(kinds) if kind == CHUNKED}


def positions_in_chunk(positions: Tensor, size: int) -> Tensor:
    """Return the chunks of tokens, (n_tokens, size) int32, of which they see what is before them.

    -1 throughout for tokens of a first chunk, which see all before them.
    """
    first = (positions // size * size).int()[:, None]
    chunk = first + torch.arange(size, dtype=torch.int32, device=positions.device)
    return torch.where(first > 0, chunk, -1)
