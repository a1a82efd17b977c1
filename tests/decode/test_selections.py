"""Tests of an indexer's selection in recorded steps, against `IndexStore`."""

import pytest
import torch
from torch import Tensor

from tandem.kernels.attention import Segment
from tandem.kv_cache.index_keys import IndexStore, NewIndexKeys, Selection
from tests.conftest import two_threads

pytestmark = pytest.mark.every_isa

SLOTS, HEADS, DIM, MOST, CAPACITY = 3, 5, 24, 6, 700


def natively(
    store: IndexStore,
    positions: Tensor,
    key: Tensor,
    query: Tensor,
    weights: Tensor | None,
    block: int = 1,
) -> Tensor:
    slots = torch.arange(SLOTS)
    out = torch.empty(SLOTS, MOST, dtype=torch.int32)
    program = two_threads().program()
    program.add_selection(store.native(0, block), slots, positions, 0.25, key, query, weights, out)
    program.run()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_weights", [True, False])
@pytest.mark.parametrize("lengths", [[0, 5, 6], [7, 300, 699]])
def test_native_selections(dtype: torch.dtype, has_weights: bool, lengths: list[int]) -> None:
    torch.manual_seed(len(lengths))
    store, new = IndexStore(SLOTS), NewIndexKeys(0, Selection(0.25, MOST))
    store.reserve(CAPACITY, 0)
    for slot, length in enumerate(lengths):  # the slots' contents; some are equal
        positions = torch.arange(length + 1)
        keys = torch.randn(length + 1, DIM).to(dtype)
        keys[1:4] = keys[:1]
        rows = torch.full_like(positions, slot)
        store.append(new, rows, positions, [Segment(slot, 0, length + 1)], keys)
    key = torch.randn(SLOTS, 2, DIM).to(dtype)[:, 0]
    query = torch.randn(HEADS, SLOTS, DIM).to(dtype).transpose(0, 1)
    weights = torch.randn(SLOTS, HEADS).to(dtype) if has_weights else None
    positions = torch.tensor(lengths)
    segments = [Segment(slot, length, 1) for slot, length in enumerate(lengths)]
    actual = natively(store, positions, key, query, weights)
    kept = store.append(new, torch.arange(SLOTS), positions, segments, key)
    expected = store.select(kept, segments, new.selection, query, weights)
    assert torch.equal(actual, expected)
    store.reserve(2 * CAPACITY, max(lengths) + 1)  # to other memory
    assert torch.equal(natively(store, positions, key, query, weights), expected)


@pytest.mark.parametrize("lengths", [[0, 26, 27], [3, 28, 699], [99, 30, 31]])
def test_keys_of_blocks_are_selected_by_their_numbers(lengths: list[int]) -> None:
    """A block's key exists at its last token; keys at other tokens are ignored."""
    block, positions = 4, torch.tensor(lengths)
    store = IndexStore(SLOTS)
    new = NewIndexKeys(0, Selection.of_keys(0.25, MOST, block))
    store.reserve(CAPACITY, 0)
    kept: dict[int, Tensor] = {}
    for slot, length in enumerate(lengths):
        at, keys = torch.arange(length), torch.randn(length, DIM)
        segments = [Segment(slot, 0, length)]
        store.append(new, torch.full_like(at, slot), at, segments, keys)
        kept[slot] = keys[block - 1 :: block]
    key, query = torch.randn(SLOTS, DIM), torch.randn(SLOTS, HEADS, DIM)
    weights = torch.randn(SLOTS, HEADS)
    actual = natively(store, positions, key, query, weights, block)
    segments = [Segment(slot, length, 1) for slot, length in enumerate(lengths)]
    scored = store.append(new, torch.arange(SLOTS), positions, segments, key)
    assert torch.equal(actual, store.select(scored, segments, new.selection, query, weights))
    for slot, length in enumerate(lengths):
        own = kept[slot] if (length + 1) % block else torch.cat([kept[slot], key[slot : slot + 1]])
        if len(own) <= MOST:
            assert (actual[slot] == -1).all()
            continue
        scores = weights[slot] @ torch.relu(query[slot] @ own.T * 0.25)
        assert actual[slot].tolist() == scores.topk(MOST).indices.sort().values.tolist()


@pytest.mark.parametrize("num_local", [0, 1, 3])
@pytest.mark.parametrize("lengths", [[0, 31, 32], [33, 350, 699]])
def test_heads_select_blocks_by_their_best_key(num_local: int, lengths: list[int]) -> None:
    block, most = 8, 4
    store, positions = IndexStore(SLOTS), torch.tensor(lengths)
    new = NewIndexKeys(0, Selection.of_heads(0.25, most, block, num_local))
    store.reserve(CAPACITY, 0)
    kept = [torch.randn(length + 1, DIM) for length in lengths]
    for slot, keys in enumerate(kept):
        at = torch.arange(len(keys))
        store.append(new, torch.full_like(at, slot), at, [Segment(slot, 0, len(keys))], keys)
    key, query = torch.randn(SLOTS, DIM), torch.randn(SLOTS, HEADS, DIM)
    out = torch.empty(SLOTS, HEADS, most, dtype=torch.int32)
    program, slots = two_threads().program(), torch.arange(SLOTS)
    program.add_selection(
        store.native(0), slots, positions, 0.25, key, query, None, out, block,
        num_local,
    )  # fmt: skip
    program.run()
    segments = [Segment(slot, length, 1) for slot, length in enumerate(lengths)]
    scored = store.append(new, slots, positions, segments, key)
    assert torch.equal(out, store.select(scored, segments, new.selection, query, None))
    for slot, length in enumerate(lengths):
        if length < most * block:
            assert (out[slot] == -1).all()
            continue
        scores = query[slot] @ torch.cat([kept[slot][:length], key[slot : slot + 1]]).T
        for head in range(HEADS):
            best = torch.stack([part.amax() for part in scores[head].split(block)])
            best[len(best) - num_local :] = float("inf")
            expected = best.topk(most).indices.sort().values
            assert out[slot, head].tolist() == expected.tolist()


def test_what_is_not_a_number_is_selected() -> None:
    store, new = IndexStore(SLOTS), NewIndexKeys(0, Selection(0.25, MOST))
    store.reserve(CAPACITY, 0)
    lengths = [8, 9, 60]
    for slot, length in enumerate(lengths):
        positions = torch.arange(length)
        keys = torch.randn(length, DIM)
        keys[5] = float("nan")
        rows = torch.full_like(positions, slot)
        store.append(new, rows, positions, [Segment(slot, 0, length)], keys)
    query = torch.randn(SLOTS, HEADS, DIM)
    selected = natively(store, torch.tensor(lengths), torch.randn(SLOTS, DIM), query, None)
    assert all(5 in row for row in selected.tolist())
