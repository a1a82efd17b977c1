"""Stand-ins for an indexer's keys, which record what the indexer's code does with them.

The code of indexers like DeepSeek-V3.2's takes the index keys of all tokens from its cache, scores
them, adds a mask, and returns the positions of the best scores. In sequence slots each token has
its own slot's keys, so the cache returns a stand-in for keys. The stand-in supports exactly these
operations, and selects positions at the end (`tandem.kv_cache.index_keys`). Any other operation
raises `UnknownIndexerError`.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.checkpoint.config_values import value_of
from tandem.foreign_types import PreTrainedModel
from tandem.kv_cache.chunks import CHUNKED, SeesOwnChunk
from tandem.kv_cache.index_keys import Selection

# Selects positions for a layer: new index keys (b, n_tokens, dim), queries (b, n_tokens, heads,
# dim), weights (b, n_tokens, heads) -> (b, n_tokens, most) int32.
Select = Callable[[Selection, Tensor, Tensor, Tensor], Tensor]


class UnknownIndexerError(TypeError):
    """An indexer does something with its keys that Tandem does not know."""


class SelectedPositions(NamedTuple):
    """Stands for a mask where every token sees the positions that an indexer selected."""

    indices: Tensor
    """(b, n_tokens, most) int32; (b, n_tokens, kv heads, most) where each head selects"""
    block: int = 1
    """Positions per selected index."""


class SeesAllBefore:
    """Stands for a mask where every token sees all earlier tokens of its slot."""

    dtype = torch.bool

    def __getitem__(self, part: object) -> "SeesAllBefore":
        """Return this mask, whichever part of it is requested."""
        return self

    def __invert__(self) -> "SeesAllBefore":
        """Return this mask, which stands for the inverted mask too."""
        return self

    def is_floating_point(self) -> bool:
        """Return False, because this stands for a boolean mask."""
        return False

    def __and__(self, selected: SelectedPositions) -> SelectedPositions:
        """Return `selected` as it is: an indexer selects no position after the token's own."""
        return selected


def masks_by_layer_type(
    model: PreTrainedModel, layers: Iterable[object]
) -> dict[str, SeesAllBefore | SeesOwnChunk | None]:
    """Return the masks to pass to a model's forward, by layer type; empty if the model needs none.

    A mask is needed where an indexer's code adds it to scores, and in models with chunked
    attention; the model's other layer types have None. `layers` are the layers of the model's
    cache.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = value_of(config, "layer_types") or []
    if CHUNKED in kinds:
        chunk = SeesOwnChunk(int(config.attention_chunk_size))
        return {k: chunk if k == CHUNKED else None for k in kinds}
    indexed = {
        k for k, layer in zip(kinds, layers, strict=False) if hasattr(layer, "update_indexer")
    }
    return {k: SeesAllBefore() if k in indexed else None for k in kinds} if indexed else {}


@dataclass(frozen=True, slots=True)
class IndexScores:
    """Records what an indexer's code does with the index keys of each token's slot."""

    select: Select
    key: Tensor
    """The step's index keys, (b, n_tokens, dim)."""
    query: Tensor | None = None
    """(b, n_tokens, heads, dim)"""
    scale: float = 1.0
    is_positive: bool = False
    """Whether negative scores are replaced by zero."""
    weights: Tensor | None = None
    """(b, n_tokens, 1, heads)"""
    is_masked: bool = False

    @classmethod
    def __torch_function__(
        cls,
        function: object,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: object = None,
    ) -> "IndexScores":
        """Record a torch function that an indexer's code calls with a stand-in.

        Raises `UnknownIndexerError` for an unknown function.
        """
        if function is torch.matmul and isinstance(scores := args[1], cls):
            return scores._multiplied(args[0])
        if function in (F.relu, torch.relu) and isinstance(scores := args[0], cls):
            return replace(scores._shaped(scores.query is not None), is_positive=True)
        raise UnknownIndexerError(f"an indexer calls {getattr(function, '__name__', function)}")

    def _multiplied(self, left: object) -> "IndexScores":
        if not isinstance(left, Tensor):
            raise UnknownIndexerError("an indexer multiplies its keys with each other")
        if self.query is None:
            return replace(self, query=left)
        if self.weights is not None or not self.is_positive:
            raise UnknownIndexerError("an indexer weighs scores that may be negative")
        return replace(self, weights=left)

    def __mul__(self, factor: float) -> "IndexScores":
        """Record that the scores are multiplied by `factor`, which must be positive."""
        if self.query is None or self.weights is not None or not factor > 0:
            raise UnknownIndexerError("an indexer scales something else than scores")
        return replace(self, scale=self.scale * factor)

    def transpose(self, first: int, second: int) -> "IndexScores":
        """Return this stand-in as the transposed keys of the product: (b, dim, n_positions)."""
        return self._shaped({first, second} == {-1, -2} and self.query is None)

    def unsqueeze(self, dim: int) -> "IndexScores":
        """Return this stand-in as keys with a dimension for heads: (b, 1, dim, n_positions)."""
        return self._shaped(dim == 1 and self.query is None)

    def squeeze(self, dim: int) -> "IndexScores":
        """Return this stand-in as weighted scores without heads: (b, n_tokens, n_positions)."""
        return self._shaped(dim == -2 and self.weights is not None)

    def _shaped(self, is_known: bool) -> "IndexScores":
        if not is_known:
            raise UnknownIndexerError("an indexer arranges its keys or scores in another way")
        return self

    def masked_fill(self, mask: object, value: float) -> "IndexScores":
        """Record that the scores of positions that tokens do not see are masked."""
        if not isinstance(mask, SeesAllBefore) or value > -1e30:
            raise UnknownIndexerError("an indexer has a mask of its own")
        return replace(self, is_masked=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """A shape whose last dimension exceeds any indexer's limit.

        The indexer then selects as many positions as its limit allows.
        """
        return (sys.maxsize,)

    def topk(self, most: int, dim: int = -1) -> "Selected":
        """Call `select` with what was recorded; return the positions of the `most` best scores."""
        if self.query is None or self.weights is None or not self.is_masked or dim != -1:
            raise UnknownIndexerError("an indexer selects by something else than weighted scores")
        selection, weights = Selection(self.scale, most), self.weights.squeeze(-2)
        return Selected(self.select(selection, self.key, self.query, weights))

    def float(self) -> "IndexScores":
        """Return this stand-in, because scores are in fp32 already."""
        return self


class Selected(NamedTuple):
    """The result of `topk`, as far as an indexer reads it."""

    indices: Tensor
    """(b, n_tokens, most) int32"""
