"""Index keys on a GPU, at addresses that stay: which positions a layer's tokens see.

As `IndexStore`. What comes out is a mask, whose size depends on the step's alone: so a step can be
captured.
"""

import torch
from torch import Tensor

from tandem.kernels.attention import Segment
from tandem.kv_cache.cuda.layers import StepPlaces
from tandem.kv_cache.index_keys import (
    KeptIndexKeys,
    NewIndexKeys,
    Selection,
    greatest,
    scores_of,
)

# fp32 scores that are computed at a time: a prompt's have a value for each head, token, position.
_MOST_SCORES = 1 << 26


class DeviceIndexKeys(KeptIndexKeys):
    """Index keys on a GPU."""

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
            scores = scores_of(scored, selection.scale, query[some], own)
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
        scores = scores_of(keys[read, : length // block], selection.scale, query, weights)
        return _seen(scores, positions, selection, length)


def _visible(places: Tensor, length: int) -> Tensor:
    return torch.arange(length, device=places.device) <= places[:, None]


def _seen(scores: Tensor, places: Tensor, selection: Selection, length: int) -> Tensor:
    """Tell which of `length` positions tokens see, by scores of blocks (n_tokens, n_blocks).

    The greatest of those before them, and the tail behind whole blocks.
    """
    num_blocks, block = scores.shape[1], selection.block
    num_whole = (places + 1) // block
    most = min(num_blocks, (selection.most + 1) // block - 1)
    is_selected = greatest(scores, num_whole, most)
    of_position = torch.arange(length, device=places.device) // block
    is_tail = of_position >= num_whole[:, None]
    is_seen = is_selected[:, of_position.clamp(max=num_blocks - 1)] | is_tail
    return _visible(places, length) & (is_seen | (places < selection.most)[:, None])
