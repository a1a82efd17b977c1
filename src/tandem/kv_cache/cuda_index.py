"""Index keys on a GPU, at addresses that stay: which positions a layer's tokens see.

As `IndexStore`, for indexers of single positions. What comes out is a mask, of a size that depends
on the step's alone, so that a step can be captured.
"""

import torch
from torch import Tensor

from tandem.kernels.attention import Segment
from tandem.kv_cache.cuda_layers import Zeros
from tandem.kv_cache.index_keys import Selection

# fp32 scores that are computed at a time: a prompt's have a value for each head, token, position.
_MOST_SCORES = 1 << 26


class DeviceIndexKeys:
    """The index keys of a model's layers by slot, in fp32: indexers score in it."""

    def __init__(self, num_slots: int, zeros: Zeros) -> None:
        """Hold nothing for so many slots, in memory that `zeros` takes."""
        self._num_slots, self._zeros = num_slots, zeros
        self._layers: dict[int, Tensor] = {}  # (slots, capacity, dim)

    @property
    def num_bytes(self) -> int:
        """Bytes that all index keys take."""
        return sum(keys.nbytes for keys in self._layers.values())

    def of_prompt(
        self,
        keys: Tensor,
        segment: Segment,
        selection: Selection,
        key: Tensor,
        query: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        """Keep a prompt's new keys (n_tokens, dim); return what its tokens see.

        `keys` are the layer's; `query` is (n_tokens, heads, dim), `weights` (n_tokens, heads); the
        result (n_tokens, positions up to the last token's).
        """
        slot, first, count = segment
        end = first + count
        keys[slot, first:end] = key.float()
        places = torch.arange(first, end, device=key.device)
        if end <= selection.most:
            return _visible(places, end)
        at_once = max(1, _MOST_SCORES // (end * query.shape[1]))
        pieces = []
        for begin in range(0, count, at_once):
            some = slice(begin, begin + at_once)
            own = None if weights is None else weights[some]
            scores = _scores(keys[slot, :end], selection.scale, query[some], own)
            pieces.append(_seen(scores, places[some], selection.most))
        return torch.cat(pieces)

    def of_step(
        self,
        keys: Tensor,
        positions: Tensor,
        length: int,
        selection: Selection,
        key: Tensor,
        query: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        """Keep a new key of each of the first slots; return what their tokens see of `length`."""
        count = len(positions)
        keys[torch.arange(count, device=key.device), positions] = key.float()
        if length <= selection.most:
            return _visible(positions, length)
        scores = _scores(keys[:count, :length], selection.scale, query, weights)
        return _seen(scores, positions, selection.most)

    def layer(self, number: int, capacity: int, dim: int) -> Tensor:
        """Return a layer's keys, which are made on first use."""
        if number not in self._layers:
            with torch.inference_mode(False):
                shape = (self._num_slots, capacity, dim)
                self._layers[number] = self._zeros(shape, torch.float32)
        return self._layers[number]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Let a slot begin with the first `length` tokens of another one."""
        for keys in self._layers.values():
            keys[target, :length] = keys[source, :length]

    def invent(self, length: int) -> None:
        """Let every slot hold `length` invented tokens."""
        for keys in self._layers.values():
            keys[:, :length].normal_()

    def grow(self, capacity: int, used: int) -> None:
        """Make room for `capacity` tokens in each slot, of which the first `used` are kept."""
        for number, old in self._layers.items():
            new = self._zeros((self._num_slots, capacity, old.shape[2]), torch.float32)
            new[:, :used] = old[:, :used]
            self._layers[number] = new


def _visible(places: Tensor, length: int) -> Tensor:
    return torch.arange(length, device=places.device) <= places[:, None]


def _scores(keys: Tensor, scale: float, query: Tensor, weights: Tensor | None) -> Tensor:
    """Score (positions, dim), or (n_tokens, positions, dim): (n_tokens, positions)."""
    by_head = torch.relu(torch.matmul(query.float(), keys.transpose(-1, -2)) * scale)
    if weights is None:
        return by_head.sum(dim=1)
    return torch.matmul(weights.float()[:, None], by_head)[:, 0]


def _seen(scores: Tensor, places: Tensor, most: int) -> Tensor:
    """Tell which positions tokens see: the greatest of those before them, of equal ones the first.

    What is no number is seen too, and the logits tell.
    """
    visible = _visible(places, scores.shape[1])
    scores = scores.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
    scores = scores.masked_fill(~visible, float("-inf"))
    least = scores.topk(most, dim=-1).values[:, -1:]
    is_greater, is_least = scores > least, scores == least
    missing = most - is_greater.sum(dim=-1, keepdim=True)
    is_selected = is_greater | (is_least & (is_least.cumsum(dim=-1) <= missing))
    sees_all = (places < most)[:, None]
    return visible & (is_selected | sees_all)
