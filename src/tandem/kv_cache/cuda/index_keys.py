"""Index keys on a GPU, at addresses that stay: which positions a layer's tokens see.

As `IndexStore`. What comes out is a mask, whose size depends on the step's alone: so a step can be
captured.
"""

import torch
from torch import Tensor

from tandem.kernels.attention import Segment
from tandem.kv_cache.cuda.layers import StepPlaces, Zeros
from tandem.kv_cache.index_keys import NewIndexKeys, Selection

# fp32 scores that are computed at a time: a prompt's have a value for each head, token, position.
_MOST_SCORES = 1 << 26


class DeviceIndexKeys:
    """The index keys of a model's layers by slot, in fp32: indexers score in it."""

    def __init__(self, num_slots: int, zeros: Zeros) -> None:
        """Hold nothing for so many slots, in memory that `zeros` takes."""
        self._num_slots, self._zeros, self._capacity = num_slots, zeros, 0
        self._layers: dict[tuple[int, int], Tensor] = {}
        """(slots, capacity / block, dim), by a layer's number and the block that a key is of"""

    @property
    def num_bytes(self) -> int:
        """Bytes that all index keys take."""
        return sum(keys.nbytes for keys in self._layers.values())

    def of_prompt(
        self,
        new: NewIndexKeys,
        segment: Segment,
        key: Tensor,
        query: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        """Keep a prompt's new keys (n_tokens, any); return what its tokens see.

        `query` is (n_tokens, heads, dim), `weights` (n_tokens, heads); the result (n_tokens,
        positions up to the last token's).
        """
        (slot, first, count), selection = segment, new.selection
        end, block = first + count, selection.block
        keys = self._kept(new.layer, 1, key.shape[1])
        keys[slot, first:end] = key.float()
        if new.pool is not None:
            begin, num_blocks = first // block, end // block  # that are whole now
            whole = keys[slot, begin * block : num_blocks * block]
            pooled = new.pool(whole.unflatten(0, (num_blocks - begin, block)))
            keys = self._kept(new.layer, block, pooled.shape[1])
            keys[slot, begin:num_blocks] = pooled.float()
        places = torch.arange(first, end, device=key.device)
        if end <= selection.most:
            return _visible(places, end)
        scored = keys[slot, : end // block]
        at_once = max(1, _MOST_SCORES // (len(scored) * query.shape[1]))
        pieces = []
        for begin in range(0, count, at_once):
            some = slice(begin, begin + at_once)
            own = None if weights is None else weights[some]
            scores = _scores(scored, selection.scale, query[some], own)
            pieces.append(_seen(scores, places[some], selection, end))
        return torch.cat(pieces)

    def of_step(
        self,
        new: NewIndexKeys,
        places: StepPlaces,
        read: slice | Tensor,
        length: int,
        key: Tensor,
        query: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        """Keep the new keys of a step; return what its tokens see of `length` positions.

        `read` chooses whose keys each row scores, as of `StaticKvCache`.
        """
        slots, positions = places.slots, places.positions
        selection, block = new.selection, new.selection.block
        keys = self._kept(new.layer, 1, key.shape[1])
        keys[slots, positions] = key.float()
        if new.pool is not None:  # of the last block, whole or not: no token sees it before it is
            last = positions // block
            of_block = last[:, None] * block + torch.arange(block, device=key.device)
            pooled = new.pool(keys[slots[:, None], of_block.clamp(max=keys.shape[1] - 1)])
            keys = self._kept(new.layer, block, pooled.shape[1])
            keys[slots, last] = pooled.float()
        if length <= selection.most:
            return _visible(positions, length)
        scores = _scores(keys[read, : length // block], selection.scale, query, weights)
        return _seen(scores, positions, selection, length)

    def _kept(self, layer: int, block: int, dim: int) -> Tensor:
        """Return a layer's keys, which are made on first use."""
        if (layer, block) not in self._layers:
            with torch.inference_mode(False):
                self._layers[layer, block] = self._room(block, dim)
        return self._layers[layer, block]

    def _room(self, block: int, dim: int) -> Tensor:
        return self._zeros((self._num_slots, -(-self._capacity // block), dim), torch.float32)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Let a slot begin with the first `length` tokens of another one."""
        for (_, block), keys in self._layers.items():
            count = -(-length // block)
            keys[target, :count] = keys[source, :count]

    def invent(self, length: int) -> None:
        """Let every slot hold `length` invented tokens."""
        for (_, block), keys in self._layers.items():
            keys[:, : -(-length // block)].normal_()

    def reserve(self, capacity: int, used: int) -> None:
        """Make room for `capacity` tokens in each slot, of which the first `used` are kept."""
        self._capacity = capacity
        for (layer, block), old in self._layers.items():
            count, new = -(-used // block), self._room(block, old.shape[2])
            new[:, :count] = old[:, :count]
            self._layers[layer, block] = new


def _visible(places: Tensor, length: int) -> Tensor:
    return torch.arange(length, device=places.device) <= places[:, None]


def _scores(keys: Tensor, scale: float, query: Tensor, weights: Tensor | None) -> Tensor:
    """Score (positions, dim), or (n_tokens, positions, dim): (n_tokens, positions)."""
    by_head = torch.relu(torch.matmul(query.float(), keys.transpose(-1, -2)) * scale)
    if weights is None:
        return by_head.sum(dim=1)
    return torch.matmul(weights.float()[:, None], by_head)[:, 0]


def _seen(scores: Tensor, places: Tensor, selection: Selection, length: int) -> Tensor:
    """Tell which of `length` positions tokens see, by scores of blocks (n_tokens, n_blocks).

    The greatest of those before them, of equal ones the first, and the tail behind whole blocks.
    What is no number is seen too, and the logits tell.
    """
    num_blocks, block = scores.shape[1], selection.block
    device, num_whole = places.device, (places + 1)[:, None] // block
    is_hidden = torch.arange(num_blocks, device=device) >= num_whole
    scores = scores.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
    scores = scores.masked_fill(is_hidden, float("-inf"))
    most = min(num_blocks, (selection.most + 1) // block - 1)
    least = scores.topk(most, dim=-1).values[:, -1:]
    is_greater, is_least = scores > least, scores == least
    missing = most - is_greater.sum(dim=-1, keepdim=True)
    is_selected = is_greater | (is_least & (is_least.cumsum(dim=-1) <= missing))
    of_position = torch.arange(length, device=device) // block
    is_seen = is_selected[:, of_position.clamp(max=num_blocks - 1)] | (of_position >= num_whole)
    return _visible(places, length) & (is_seen | (places < selection.most)[:, None])
