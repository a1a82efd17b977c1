"""Tests of sorting a layer's routed tokens by expert, interpreted."""

from types import ModuleType

import pytest
import torch

from tests.kernels.interpreter import interpreted_module

pytest.importorskip("triton")
sorting = interpreted_module("tandem.triton_kernels.sorting")


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "num_idle"),
    [(9, 4, 2, 0), (9, 1, 1, 0), (300, 5, 4, 0), (64, 130, 8, 7), (12, 8, 1, 3), (40, 3, 2, 39)],
)
def test_rows_stand_by_expert_in_the_tokens_order(
    sorting: ModuleType, num_tokens: int, num_experts: int, top_k: int, num_idle: int
) -> None:
    random = torch.Generator().manual_seed(4)
    index = torch.randint(num_experts, (num_tokens, top_k), generator=random)
    index[num_tokens - num_idle :] = -1
    index[0, 0] = num_experts  # a router's own padding
    addresses = torch.arange(num_experts) * 16
    rows, row_of = sorting.sorted_by_expert(index, addresses)
    flat = index.reshape(-1).tolist()
    expected = [i for e in range(num_experts) for i, chosen in enumerate(flat) if chosen == e]
    assert row_of.shape == index.shape
    places = {i: row for row, i in enumerate(expected)}
    assert row_of.reshape(-1).tolist() == [places.get(i, -1) for i in range(len(flat))]
    assert rows.row_token[: len(expected)].tolist() == [i // top_k for i in expected]
    counts = [flat.count(e) for e in range(num_experts)]
    begin = [sum(counts[:e]) for e in range(num_experts + 1)]
    assert rows.begin.tolist() == begin
    tiles = [
        (e, begin[e] + at)
        for e in range(num_experts)
        for at in range(0, counts[e], rows.block_rows)
    ]
    found = list(zip(rows.tile_expert.tolist(), rows.tile_first.tolist(), strict=True))
    assert found[: len(tiles)] == tiles
    for expert, first in found[len(tiles) :]:  # surplus tiles have no rows
        assert 0 <= expert < num_experts
        assert first >= begin[expert + 1]


@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 1), (1, 8), (3, 4), (8, 10)])
def test_each_routed_token_finds_its_expert(
    sorting: ModuleType, num_tokens: int, top_k: int
) -> None:
    random = torch.Generator().manual_seed(5)
    index = torch.randint(-1, 7, (num_tokens, top_k), generator=random)  # 5 and 6 are padding too
    table = torch.arange(5) * 64 + 4096
    addresses, row_of = sorting.each_alone(index, table)
    assert row_of.shape == index.shape
    rows = zip(index.flatten().tolist(), addresses.tolist(), row_of.flatten().tolist(), strict=True)
    for row, (chosen, address, found) in enumerate(rows):
        is_expert = 0 <= chosen < 5
        assert found == (row if is_expert else -1)
        assert address == 4096 + 64 * (chosen if is_expert else 0)
