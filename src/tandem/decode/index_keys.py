"""Index keys: what layers with an indexer keep of each token beside its keys and values.

An indexer (DeepSeek-V3.2's and its like) scores every position of a token's slot, and attention
sees the best ones alone. While a slot holds no more than so many, it sees all, and nothing is
scored.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.attention import Segment

# fp32 values that are computed at a time: a prompt's scores have a value for each head, token and
# position.
_MOST_SCORES = 1 << 24


class Selection(NamedTuple):
    """Which positions are selected: of the greatest sum of weight * relu(scale * query . key)."""

    scale: float
    most: int
    """Positions that a token sees at most."""


class IndexStore:
    """The index keys of a model's layers by slot, in fp32: indexers score in it."""

    def __init__(self, num_slots: int) -> None:
        """Hold nothing for so many slots; layers come as the model asks for them."""
        self._num_slots = num_slots
        self._layers: dict[int, Tensor] = {}
        """(slots, capacity, dim)"""
        self._most = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that all index keys take."""
        return sum(keys.nbytes for keys in self._layers.values())

    def bytes_of(self, num_tokens: int) -> int:
        """Return the bytes of so many tokens of one slot, in all layers."""
        return sum(keys[0, :1].nbytes for keys in self._layers.values()) * num_tokens

    def read_bytes(self, length: int) -> int:
        """Return the bytes that a token reads in a slot of so many tokens."""
        return self.bytes_of(length) if length > self._most else 0

    def reserve(self, capacity: int, used: int) -> None:
        """Make room for `capacity` tokens in each slot, of which the first `used` are kept."""
        for layer, keys in self._layers.items():
            self._layers[layer] = new = self._room(capacity, keys.shape[2])
            new[:, :used] = keys[:, :used]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Let a slot begin with the first `length` tokens of another one."""
        for keys in self._layers.values():
            keys[target, :length] = keys[source, :length]

    def pretend(self, length: int) -> None:
        """Let every slot hold `length` invented tokens."""
        for keys in self._layers.values():
            keys[:, :length].normal_()

    def append(
        self, layer: int, capacity: int, rows: Tensor, positions: Tensor, keys: Tensor
    ) -> Tensor:
        """Keep (n_tokens, dim) of a layer; return the layer's (slots, capacity, dim).

        `capacity` is the room of a layer that is new.
        """
        if layer not in self._layers:
            self._layers[layer] = self._room(capacity, keys.shape[1])
        kept = self._layers[layer]
        kept[rows, positions] = keys.float()
        return kept

    def select(
        self,
        kept: Tensor,
        segments: Sequence[Segment],
        selection: Selection,
        query: Tensor,
        weights: Tensor,
    ) -> Tensor:
        """Return the positions that tokens see: (n_tokens, most) int32; -1 first: all.

        `query` is (n_tokens, heads, dim) and `weights` (n_tokens, heads), in the order of
        `segments`.
        """
        self._most = most = selection.most
        selected = torch.full((len(query), most), -1, dtype=torch.int32, device="cpu")
        first = 0
        for segment in segments:
            end = segment.first_position + segment.num_tokens
            some = max(0, most - segment.first_position)  # see all
            parts = range(first + some, first + segment.num_tokens)
            for part in _cut(parts, _MOST_SCORES // (end * query.shape[1])):
                scores = _scores(kept[segment.row, :end], selection, query[part], weights[part])
                seen = torch.arange(part.start, part.stop, device="cpu") - first
                seen += segment.first_position
                _hide_later(scores, seen)
                selected[part] = _greatest(scores, most)
            first += segment.num_tokens
        return selected

    def _room(self, capacity: int, dim: int) -> Tensor:
        return torch.zeros((self._num_slots, capacity, dim), device="cpu")


def _cut(tokens: range, count: int) -> Iterator[slice]:
    count = max(1, count)
    for first in range(tokens.start, tokens.stop, count):
        yield slice(first, min(first + count, tokens.stop))


def _scores(keys: Tensor, selection: Selection, query: Tensor, weights: Tensor) -> Tensor:
    """Score (n_positions, dim) for some tokens: (n_tokens, n_positions)."""
    by_head = torch.relu(torch.matmul(query.float(), keys.T) * selection.scale)
    return torch.matmul(weights.float()[:, None], by_head)[:, 0]


def _greatest(scores: Tensor, most: int) -> Tensor:
    """Return the places (n, most) of the greatest of (n, count); of equal ones the first.

    What `topk` does with equal ones depends on the places that are hidden, so on how prompts are
    cut into steps.
    """
    least = scores.topk(most, dim=-1).values[:, -1:]
    is_greater, is_least = scores > least, scores == least
    missing = most - is_greater.sum(dim=-1, keepdim=True)
    is_selected = is_greater | (is_least & (is_least.cumsum(dim=-1) <= missing))
    return is_selected.nonzero()[:, 1].view(len(scores), most)


def _hide_later(scores: Tensor, positions: Tensor) -> None:
    """Give positions after the tokens' own (n_tokens,) the least score.

    What is no number gets the greatest: attention sees it too, and the logits tell.
    """
    scores.nan_to_num_(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
    later = torch.arange(scores.shape[1], device="cpu")[None] > positions[:, None]
    scores.masked_fill_(later, float("-inf"))
