"""Index keys on a GPU at fixed addresses, which decide what a layer's tokens see.

Unlike in `IndexStore`, the result is a mask whose shape depends only on the step's form, so that
the step can be captured. If keys are selected instead of positions, a step gets the keys' numbers.
"""

import torch
from torch import Tensor

from tandem.kernels.attention import Segment
from tandem.kv_cache.cuda.layers import DecodeKernels, StepPlaces
from tandem.kv_cache.index_keys import (
    KeptIndexKeys,
    NewIndexKeys,
    Selection,
    Zeros,
    greatest,
    greatest_by_head,
    scores_by_head,
    scores_of,
)

# fp32 scores that are computed at a time: a prompt's have a value for each head, token, position.
_MOST_SCORES = 1 << 26


class DeviceIndexKeys(KeptIndexKeys):
    """Index keys on a GPU, stored in fp32."""

    def __init__(self, num_slots: int, zeros: Zeros, kernels: DecodeKernels | None = None) -> None:
        """Start empty, for `num_slots` slots; `zeros` allocates the keys.

        `kernels`, if given, make the selections of keys; torch makes the selections of positions.
        """
        super().__init__(num_slots, zeros)
        self._kernels = kernels

    def of_prompt(
        self,
        new: NewIndexKeys,
        segment: Segment,
        key: Tensor,
        query: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        """Store a prompt's new keys (n_tokens, any); return a mask of what its tokens see.

        `query` is (n_tokens, heads, dim), `weights` (n_tokens, heads). The mask is (n_tokens,
        positions up to the last token's), or (n_tokens, keys) if keys are selected. It is
        (n_tokens, heads, positions) if each head selects for itself.
        """
        (slot, first, count), selection = segment, new.selection
        end, block, of_key = first + count, selection.block, selection.key_block
        keys = self._kept(new.layer, of_key, key.shape[1])
        keys[slot, first // of_key : end // of_key] = last_of_blocks(key, first, of_key).float()
        if new.pool is not None:
            begin, num_blocks = first // block, end // block  # that are whole now
            whole = keys[slot, begin * block : num_blocks * block]
            pooled = new.pool(whole.unflatten(0, (num_blocks - begin, block)))
            keys = self._kept(new.layer, block, pooled.shape[1])
            keys[slot, begin:num_blocks] = pooled.float()
        places = torch.arange(first, end, device=key.device)
        if end <= selection.most:
            return _all_seen(places, selection, end, query)
        scored = keys[slot, : end // selection.scored_block]
        if self._kernels is not None and selection.are_keys and weights is not None:
            return self._kernels.select_keys_of_prompt(
                scored, places, query, weights, block=block, scale=selection.scale,
                most=selection.most_blocks, first=first,
            )  # fmt: skip
        at_once = max(1, _MOST_SCORES // (len(scored) * query.shape[1]))
        pieces = []
        for begin in range(0, count, at_once):
            some = slice(begin, begin + at_once)
            own = None if weights is None else weights[some]
            pieces.append(_seen_by(scored, selection, query[some], own, places[some], end))
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
        """Store a step's new keys; return a mask (n_tokens, length) of what its tokens see.

        The mask is (n_tokens, heads, length) if each head selects for itself. If keys are selected,
        the result has their numbers (n_tokens, most) instead, padded with -1. `read` is an index of
        the slots whose keys the tokens score: a slice or a tensor of one slot for each token.
        """
        slots, positions = places.slots, places.positions
        selection, block = new.selection, new.selection.block
        keys = self._kept(new.layer, selection.key_block, key.shape[1])
        if self._kernels is not None and selection.are_keys and weights is not None:
            return self._kernels.select_keys(
                keys, slots, positions, key, query, weights,
                block=block, scale=selection.scale, most=selection.most_blocks, length=length,
            )  # fmt: skip
        keys[slots, number_of_key(positions, selection.key_block, keys.shape[1])] = key.float()
        if new.pool is not None:  # of the last block, whole or not: no token sees it before it is
            last = positions // block
            of_block = last[:, None] * block + torch.arange(block, device=key.device)
            pooled = new.pool(keys[slots[:, None], of_block.clamp(max=keys.shape[1] - 1)])
            keys = self._kept(new.layer, block, pooled.shape[1])
            keys[slots, last] = pooled.float()
        if length <= selection.most:
            seen = _all_seen(positions, selection, length, query)
        else:
            scored = keys[read, : length // selection.scored_block]
            seen = _seen_by(scored, selection, query, weights, positions, length)
        if not selection.are_keys:
            return seen
        is_seen, numbers = seen.byte().topk(min(selection.most_blocks, seen.shape[1]))
        return torch.where(is_seen > 0, numbers, -1)

    def _room(self, block: int, dim: int, dtype: torch.dtype) -> Tensor:
        num_keys = -(-self._capacity // block) + (block > 1)  # see `number_of_key`
        return self._zeros((self._num_slots, num_keys, dim), dtype)


def last_of_blocks(tokens: Tensor, first: int, block: int) -> Tensor:
    """Return those of `tokens` (n_tokens, ...) that end a block; they begin at position `first`."""
    return tokens[block - 1 - first % block :: block]


def number_of_key(positions: Tensor, block: int, room: int) -> Tensor:
    """Return the numbers of the keys that a step's tokens add, one key per block of tokens.

    Tokens that end no block get the number `room` - 1, whose key is never read.
    """
    if block == 1:
        return positions
    return torch.where((positions + 1) % block == 0, positions // block, room - 1)


def num_keys(length: int, block: int) -> int:
    """Return how many keys are read for `length` positions: at least 1, even if none exists."""
    return max(1, length // block)


def whole_keys(places: Tensor, block: int, length: int) -> Tensor:
    """Return the numbers (n_tokens, keys) of the keys that each token can see; -1 for other keys.

    A token can see the keys of blocks that are whole at its place. It sees all of them unless an
    indexer selects some.
    """
    seen = are_whole(places, block, length)
    return torch.where(seen, torch.arange(seen.shape[1], device=places.device), -1)


def are_whole(places: Tensor, block: int, length: int) -> Tensor:
    """Return a mask (n_tokens, keys) of the keys whose blocks are whole at each token's place."""
    numbers = torch.arange(num_keys(length, block), device=places.device)
    return numbers < ((places + 1) // block)[:, None]


def _all_seen(places: Tensor, selection: Selection, length: int, query: Tensor) -> Tensor:
    """Return a mask in which tokens see all positions up to their own, without a selection.

    The mask is (n_tokens, length), or (n_tokens, heads, length) with `by_head`. With `are_keys`, it
    is (n_tokens, keys), and tokens see the keys of whole blocks.
    """
    seen = _visible(places, selection, length)
    return seen[:, None].expand(-1, query.shape[1], -1) if selection.by_head else seen


def _seen_by(
    keys: Tensor,
    selection: Selection,
    query: Tensor,
    weights: Tensor | None,
    places: Tensor,
    length: int,
) -> Tensor:
    """Score `keys`; return a mask of which of `length` positions tokens see.

    The mask has the same shape as the result of `_all_seen`.
    """
    if not selection.by_head:
        scores = scores_of(keys, selection.scale, query, weights)
        return _seen(scores, places, selection, length)
    scores = scores_by_head(keys, selection, query, places)
    of_position = torch.arange(length, device=places.device) // selection.block
    is_best = greatest_by_head(scores, selection, places)[..., of_position]
    return is_best & _all_seen(places, selection, length, query)


def _visible(places: Tensor, selection: Selection, length: int) -> Tensor:
    if selection.are_keys:
        return are_whole(places, selection.block, length)
    return torch.arange(length, device=places.device) <= places[:, None]


def _seen(scores: Tensor, places: Tensor, selection: Selection, length: int) -> Tensor:
    """Return a mask (n_tokens, length) of what tokens see by `scores` (n_tokens, n_blocks).

    Tokens see the best whole blocks, and the positions after the last whole block up to their own.
    If keys are selected, the mask is (n_tokens, keys).
    """
    num_blocks, block = scores.shape[1], selection.block
    num_whole = (places + 1) // block
    is_selected = greatest(scores, num_whole, min(num_blocks, selection.most_blocks))
    if selection.are_keys:
        return is_selected & are_whole(places, block, length)
    of_position = torch.arange(length, device=places.device) // block
    is_tail = of_position >= num_whole[:, None]
    is_seen = is_selected[:, of_position.clamp(max=num_blocks - 1)] | is_tail
    return _visible(places, selection, length) & (is_seen | (places < selection.most)[:, None])
