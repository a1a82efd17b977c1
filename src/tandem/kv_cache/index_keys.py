"""Index keys: what layers with an indexer keep of each token besides keys and values.

An indexer (such as DeepSeek-V3.2's) scores every position of a token's slot, and attention sees
only a fixed number of best positions. While a slot holds no more positions than this limit,
attention sees all of them, and nothing is scored. Some indexers score whole blocks of positions: by
a key pooled from the block's tokens, or for each KV head by the best key in the block.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels import _native
from tandem.kernels.attention import Segment
from tandem.kernels.dense import VALUE_DTYPES

# fp32 values computed at a time. A prompt's scores have one value per head, token and position.
_MOST_SCORES = 1 << 24


# Returns zeros of a shape and dtype; raises `CapacityError`.
Zeros = Callable[[tuple[int, ...], torch.dtype], Tensor]


class Selection(NamedTuple):
    """How positions are selected: those with the greatest scores.

    A score is the sum over heads of weight * relu(scale * query . key), except with `by_head`.
    """

    scale: float
    most: int
    """The most positions that a token sees."""
    block: int = 1
    """Positions per selected block; positions after the last whole block are always visible."""
    are_keys: bool = False
    """Whether each complete block has one key, from its last token; key numbers are selected
    instead of positions."""
    by_head: bool = False
    """Whether each head selects its own blocks, by the greatest scale * query . key in a block."""
    num_local: int = 0
    """With `by_head`: how many of the latest blocks, up to a token's own, are always selected."""

    @classmethod
    def of_heads(cls, scale: float, most_blocks: int, block: int, num_local: int) -> "Selection":
        """Return a selection in which each head selects `most_blocks` blocks.

        The last `num_local` blocks are always among them.
        """
        most = most_blocks * block
        return cls(scale, most, block, by_head=True, num_local=min(num_local, most_blocks))

    @classmethod
    def of_blocks(cls, scale: float, most_blocks: int, block: int) -> "Selection":
        """Return a selection of `most_blocks` blocks and the tokens after the last whole block."""
        return cls(scale, (most_blocks + 1) * block - 1, block)

    @classmethod
    def of_keys(cls, scale: float, most_keys: int, block: int) -> "Selection":
        """Return a selection of `most_keys` keys, which are stored one per block."""
        return cls.of_blocks(scale, most_keys, block)._replace(are_keys=True)

    @property
    def most_blocks(self) -> int:
        """The largest number of blocks that a token, or each of its heads, selects."""
        return self.most // self.block if self.by_head else (self.most + 1) // self.block - 1

    @property
    def width(self) -> int:
        """The size of the last dimension of `IndexStore.select`'s result."""
        return self.most_blocks if self.are_keys or self.by_head else self.most

    @property
    def scored_block(self) -> int:
        """Tokens per scored key; with `by_head`, a block's score is the best of its tokens'."""
        return 1 if self.by_head else self.block

    @property
    def key_block(self) -> int:
        """Tokens per stored key; pooled keys are stored separately, one per `block`."""
        return self.block if self.are_keys else 1


# Computes the keys (n_blocks, dim) of whole blocks from their tokens' keys (n_blocks, block, any).
Pool = Callable[[Tensor], Tensor]


class NewIndexKeys(NamedTuple):
    """A layer's number, and how its index keys are pooled and select positions."""

    layer: int
    selection: Selection
    pool: Pool | None = None
    """Pools the tokens' keys of each block; None: keys are scored as they are stored."""


class KeptIndexKeys:
    """The index keys of a model's layers by slot; scores are in fp32."""

    def __init__(self, num_slots: int, zeros: Zeros) -> None:
        """Start empty, for `num_slots` slots; `zeros` allocates the keys."""
        self._num_slots, self._zeros, self._capacity = num_slots, zeros, 0
        self._layers: dict[tuple[int, int], Tensor] = {}
        """(slots, capacity / block, dim), by layer number and block size"""

    @property
    def num_bytes(self) -> int:
        """Bytes that the index keys of all layers and slots take, unused room included."""
        return sum(keys.nbytes for keys in self._layers.values())

    def reserve(self, capacity: int, used: int) -> None:
        """Make room for `capacity` tokens in each slot; keep the first `used` tokens' keys."""
        self._capacity = capacity
        for (layer, block), keys in self._layers.items():
            count = -(-used // block)
            self._layers[layer, block] = new = self._room(block, keys.shape[2], keys.dtype)
            new[:, :count] = keys[:, :count]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the keys of slot `source`'s first `length` tokens to slot `target`."""
        for (_, block), keys in self._layers.items():
            count = -(-length // block)
            keys[target, :count] = keys[source, :count]

    def pretend(self, length: int) -> None:
        """Fill every slot with made-up keys for `length` tokens."""
        for (_, block), keys in self._layers.items():
            keys[:, : -(-length // block)].normal_()

    def _kept(self, layer: int, block: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return all slots' keys of a layer, one per `block` tokens; allocate them on first use."""
        if (layer, block) not in self._layers:
            with torch.inference_mode(False):
                self._layers[layer, block] = self._room(block, dim, dtype)
        return self._layers[layer, block]

    def _room(self, block: int, dim: int, dtype: torch.dtype) -> Tensor:
        return self._zeros((self._num_slots, -(-self._capacity // block), dim), dtype)


class IndexStore(KeptIndexKeys):
    """Index keys on the CPU, stored in the model's dtype if kernels read it, otherwise in fp32."""

    def __init__(self, num_slots: int) -> None:
        """Start empty, for `num_slots` slots; layers are added when the model uses them."""
        super().__init__(num_slots, _zeros)
        self._native: dict[tuple[int, int], _native.IndexLayer] = {}
        """By layer number and block size: the keys in the form that native steps read."""
        self._most = 0

    def bytes_of(self, num_tokens: int) -> int:
        """Return the bytes that all layers' keys of `num_tokens` tokens take in one slot."""
        kept = self._layers.items()
        return sum(keys[0, :1].nbytes * -(-num_tokens // block) for (_, block), keys in kept)

    @property
    def blocks(self) -> set[int]:
        """The set of the layers' numbers of tokens per key."""
        return {block for _, block in self._layers}

    def memory(self, slot: int, first: int, num_tokens: int) -> Iterator[Tensor]:
        """Yield for each layer a view of the keys of a slot's `num_tokens` tokens from `first` on.

        The views are (keys, bytes) uint8. The tokens must fill whole blocks. A layer with pooled
        keys has two views.
        """
        for (_, block), keys in sorted(self._layers.items()):
            yield keys[slot, first // block : (first + num_tokens) // block].view(torch.uint8)

    def read_tokens(self, layer: int, length: int) -> int:
        """Return how many tokens a layer's attention reads in a slot of `length` tokens.

        In a layer with an indexer, at most the number of positions that the indexer selects.
        """
        is_indexed = any(layer == number for number, _ in self._layers)
        return min(length, self._most) if is_indexed else length

    def read_bytes(self, length: int) -> int:
        """Return the most bytes of index keys that a token reads in a slot of `length` tokens.

        0 if attention sees all positions, because nothing is scored then.
        """
        return self.bytes_of(length) if length > self._most else 0

    def reserve(self, capacity: int, used: int) -> None:
        """Make room for `capacity` tokens in each slot; keep the first `used` tokens' keys."""
        super().reserve(capacity, used)
        for number, block in self._native:
            self.native(number, block)

    def native(self, layer: int, block: int = 1) -> _native.IndexLayer:
        """Return a layer's keys in the form that native steps read; `reserve` updates them."""
        native = self._native.setdefault((layer, block), _native.IndexLayer())
        native.set_keys(self._layers[layer, block], block)
        return native

    def append(
        self,
        new: NewIndexKeys,
        slots: Tensor,
        positions: Tensor,
        segments: Sequence[Segment],
        keys: Tensor,
    ) -> Tensor:
        """Store keys (n_tokens, any) of a layer, and the pooled keys of blocks that are now whole.

        Returns the keys in all slots that `select` scores: the pooled keys if `new` has a `pool`,
        otherwise the stored keys. `slots` and `positions` are (n_tokens,); `segments` describe the
        same tokens.
        """
        block = new.selection.key_block
        tokens = self._kept(new.layer, block, keys.shape[1], _dtype_of(keys))
        ends = (positions + 1) % block == 0
        tokens[slots[ends], positions[ends] // block] = keys[ends].to(tokens.dtype)
        if new.pool is None:
            return tokens
        block = new.selection.block
        for slot, first, count in segments:
            begin, end = first // block, (first + count) // block  # blocks that are complete now
            if begin == end and (new.layer, block) in self._layers:
                continue
            whole = tokens[slot, begin * block : end * block].unflatten(0, (end - begin, block))
            pooled = new.pool(whole.float())
            blocks = self._kept(new.layer, block, pooled.shape[1], _dtype_of(pooled))
            blocks[slot, begin:end] = pooled.to(blocks.dtype)
        return self._layers[new.layer, block]

    def select(
        self,
        kept: Tensor,
        segments: Sequence[Segment],
        selection: Selection,
        query: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        """Return the positions that tokens see: (n_tokens, most) int32.

        A token whose first number is -1 sees all positions up to its own. With `are_keys`, the
        result has numbers of keys instead of positions; with `by_head`, it has numbers of blocks,
        (n_tokens, heads, most). `kept` must be what `append` returned. `query` is (n_tokens, heads,
        dim) and `weights` (n_tokens, heads), in the order of `segments`.
        """
        self._most = most = selection.most
        heads = (query.shape[1],) if selection.by_head else ()
        shape = len(query), *heads, selection.width
        selected = torch.full(shape, -1, dtype=torch.int32, device="cpu")
        first = 0
        for slot, position, count in segments:
            some = max(0, most - position)  # these tokens see all positions
            keys = kept[slot, : (position + count) // selection.scored_block].float()
            parts = range(first + some, first + count)
            for part in _cut(parts, _MOST_SCORES // max(1, len(keys) * query.shape[1])):
                own = torch.arange(part.start, part.stop, device="cpu") + (position - first)
                if selection.by_head:
                    scores = scores_by_head(keys, selection, query[part], own)
                    selected[part] = _blocks(scores, selection, own)
                    continue
                part_weights = None if weights is None else weights[part]
                scores = scores_of(keys, selection.scale, query[part], part_weights)
                selected[part] = _positions(scores, selection, own)
            first += count
        return selected


def _dtype_of(keys: Tensor) -> torch.dtype:
    """Return the dtype in which to store `keys`: the same if kernels can read it, else fp32."""
    return keys.dtype if keys.dtype in VALUE_DTYPES else torch.float32


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="cpu")


def _cut(tokens: range, count: int) -> Iterator[slice]:
    count = max(1, count)
    for first in range(tokens.start, tokens.stop, count):
        yield slice(first, min(first + count, tokens.stop))


def scores_of(keys: Tensor, scale: float, query: Tensor, weights: Tensor | None) -> Tensor:
    """Return each token's score for each block: (n_tokens, n_blocks).

    `keys` are (n_blocks, dim) or (n_tokens, n_blocks, dim), `weights` (n_tokens, heads); without
    weights, the heads' scores are added.
    """
    by_head = torch.relu(torch.matmul(query.float(), keys.transpose(-1, -2)) * scale)
    if weights is None:
        return by_head.sum(dim=1)
    return torch.matmul(weights.float()[:, None], by_head)[:, 0]


def scores_by_head(keys: Tensor, selection: Selection, query: Tensor, own: Tensor) -> Tensor:
    """Return each head's score of each block: (n_tokens, heads, n_blocks).

    A block's score is the best among its keys up to the token's position; `own` has the tokens'
    positions. `keys` are (n_positions, dim) or (n_tokens, n_positions, dim). Blocks that are always
    selected have an infinite score.
    """
    block, count = selection.block, keys.shape[-2]
    scores = torch.matmul(query.float(), keys.transpose(-1, -2)) * selection.scale
    is_later = torch.arange(count, device=own.device) > own[:, None]
    scores = scores.masked_fill_(is_later[:, None], float("-inf"))
    padded = F.pad(scores, (0, -count % block), value=float("-inf"))
    best = padded.unflatten(-1, (-1, block)).amax(dim=-1)
    before = own[:, None] // block - torch.arange(best.shape[-1], device=own.device)
    is_local = (before >= 0) & (before < selection.num_local)
    scored: Tensor = best.masked_fill_(is_local[:, None], float("inf"))
    return scored


def greatest_by_head(scores: Tensor, selection: Selection, own: Tensor) -> Tensor:
    """Return a mask of the blocks that each head selects by `scores` (n_tokens, heads, n_blocks).

    The mask has the shape of `scores`; `own` has the tokens' positions.
    """
    counts = (own // selection.block + 1).repeat_interleave(scores.shape[1])
    most = min(selection.most_blocks, scores.shape[2])
    return greatest(scores.flatten(0, 1), counts, most).view_as(scores)


def _blocks(scores: Tensor, selection: Selection, own: Tensor) -> Tensor:
    """Return the numbers of the blocks that each head selects: (n_tokens, heads, most_blocks)."""
    is_best = greatest_by_head(scores, selection, own)
    return is_best.nonzero()[:, 2].view(*scores.shape[:2], selection.most_blocks)


def _positions(scores: Tensor, selection: Selection, own: Tensor) -> Tensor:
    """Return the positions (n_tokens, most) that tokens at positions `own` see.

    The positions of the best blocks come first, then those after the last whole block, padded with
    -1. If keys are selected, the result has the numbers of the best keys instead.
    """
    block, most = selection.block, selection.most_blocks
    is_best = greatest(scores, (own + 1) // block, most)
    best = is_best.nonzero()[:, 1].view(len(scores), most)
    if selection.are_keys:
        return best
    selected = best[..., None] * block + torch.arange(block, device="cpu")
    tail = ((own + 1) // block * block)[:, None] + torch.arange(block - 1, device="cpu")
    tail = tail.masked_fill(tail > own[:, None], -1)
    return torch.cat([selected.flatten(1), tail], dim=1)


def greatest(scores: Tensor, counts: Tensor, most: int) -> Tensor:
    """Return a mask of the `most` greatest scores in each row of `scores` (n, blocks).

    Only the first `counts` (n,) scores of a row are candidates. Among equal scores the first are
    chosen: `topk`'s choice would depend on masked scores, and so on how prompts are cut into steps.
    NaN counts as the greatest score, so that attention reads its block and the logits show the NaN.
    """
    later = torch.arange(scores.shape[1], device=scores.device) >= counts[:, None]
    scores = scores.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
    scores = scores.masked_fill(later, float("-inf"))
    least = scores.topk(most, dim=-1).values[:, -1:]
    is_greater, is_least = scores > least, scores == least
    missing = most - is_greater.sum(dim=-1, keepdim=True)
    return is_greater | (is_least & (is_least.cumsum(dim=-1) <= missing))
