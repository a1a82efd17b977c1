"""Selects an indexer's keys in a decode step or a prompt: launches `index_keys`, and never waits.

A step's selection is one torch operation, so that recordings and captures see it.
"""

import torch
from torch import Tensor

from tandem.triton_kernels import index_keys

_BLOCK_KEYS = 32
_BLOCK_HEADS = 16
_BLOCK_SCORES = 2048
_PROMPT_KEYS, _PROMPT_TOKENS = 32, 32
_MOST_SCORES = 1 << 26  # fp32 scores that are computed at a time
_SELECTING_WARPS = 8


@torch.library.custom_op("tandem::select_keys", mutates_args=("keys",))
def select_keys(
    keys: Tensor,
    slots: Tensor,
    positions: Tensor,
    key: Tensor,
    query: Tensor,
    weights: Tensor,
    block: int,
    scale: float,
    most: int,
    length: int,
) -> Tensor:
    """See `DecodeKernels.select_keys`."""
    (_, room, dim), (num_tokens, num_heads, _) = keys.shape, query.shape
    key, query, weights = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (key, query, weights)
    )
    layer = {"block": block, "dim": dim, "width": max(16, 1 << (dim - 1).bit_length())}
    index_keys.store_index_keys[num_tokens,](
        keys, slots, positions, key, key.stride(0), room, **layer
    )
    num_keys = max(1, length // block)  # keys that a token may see
    most = min(most, num_keys)
    scores = query.new_empty(num_tokens, num_keys, dtype=torch.float32)
    if num_keys > most:
        index_keys.score_index_keys[-(-num_keys // _BLOCK_KEYS), num_tokens](
            keys, slots, positions, query, weights, scores, query.stride(0), query.stride(1),
            weights.stride(0), room, num_keys, scale=scale, num_heads=num_heads,
            block_keys=_BLOCK_KEYS, block_heads=_BLOCK_HEADS, **layer,
        )  # fmt: skip
    chosen = torch.empty(num_tokens, most, dtype=torch.int64, device=keys.device)
    index_keys.select_index_keys[num_tokens,](
        scores, positions, chosen, num_keys, most, block=block, block_scores=_BLOCK_SCORES,
        marks=False, num_warps=_SELECTING_WARPS,
    )  # fmt: skip
    return chosen


def select_prompt_keys(
    keys: Tensor,
    positions: Tensor,
    query: Tensor,
    weights: Tensor,
    block: int,
    scale: float,
    most: int,
    first: int,
) -> Tensor:
    """See `DecodeKernels.select_keys_of_prompt`."""
    num_keys, dim = keys.shape
    query, weights = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, weights))
    at_once = max(1, _MOST_SCORES // num_keys)
    seen = torch.zeros(len(query), num_keys, dtype=torch.uint8, device=keys.device)
    for begin in range(0, len(query), at_once):
        some = slice(begin, begin + at_once)
        own, weight, places = query[some], weights[some], positions[some]
        num_tokens, num_heads, _ = own.shape
        scores = own.new_empty(num_tokens, num_keys, dtype=torch.float32)
        grid = -(-num_keys // _PROMPT_KEYS), -(-num_tokens // _PROMPT_TOKENS)
        index_keys.score_prompt_keys[grid](
            keys, own, weight, scores, own.stride(0), own.stride(1), weight.stride(0),
            first + begin, num_tokens, num_keys, scale=scale, block=block, num_heads=num_heads,
            dim=dim, width=max(16, 1 << (dim - 1).bit_length()), block_keys=_PROMPT_KEYS,
            block_tokens=_PROMPT_TOKENS,
        )  # fmt: skip
        index_keys.select_index_keys[num_tokens,](
            scores, places, seen[some], num_keys, min(most, num_keys), block=block,
            block_scores=_BLOCK_SCORES, marks=True, num_warps=_SELECTING_WARPS,
        )  # fmt: skip
    return seen.view(torch.bool)
