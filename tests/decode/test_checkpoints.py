"""Tests of checkpoints of states: where a prompt leaves them, which fit a budget, their bytes."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.kv_cache.checkpoints import KeptCheckpoints, cut_lengths, most_checkpoints
from tandem.kv_cache.cpu_states import pieces_of


def kept_at(*lengths: int) -> KeptCheckpoints:
    """Return one slot's checkpoints of one byte each."""
    kept = KeptCheckpoints(1)
    for length in lengths:
        kept.add(0, length, [torch.zeros(1, dtype=torch.int8)])
    return kept


def lengths_of(kept: KeptCheckpoints, slot: int = 0) -> list[int]:
    """Return the lengths of a slot's checkpoints in descending order."""
    found = []
    length = kept.newest(slot)
    while (one := kept.longest(slot, length)) is not None:
        found.append(one.length)
        length = one.length - 1
    return found


def test_a_prompt_is_cut_every_512_tokens_and_more_often_near_its_end() -> None:
    assert cut_lengths(0, 2048, 0) == [512, 1024, 1536, 1920, 2040]
    assert cut_lengths(2048, 2348, 2040) == [2220, 2340]
    assert cut_lengths(0, 72, 0) == [64]
    assert cut_lengths(0, 71, 0) == []


@given(st.integers(0, 5000), st.integers(1, 4096), st.integers(0, 5000))
def test_cuts_are_inside_their_part_and_apart(first: int, count: int, newest: int) -> None:
    newest = min(newest, first)
    cuts = cut_lengths(first, first + count, newest)
    assert all(first < cut < first + count for cut in cuts)
    assert all(b - a >= 64 for a, b in zip([newest, *cuts], cuts, strict=False))


def test_checkpoints_of_prompts_that_share_forwards_are_known_before() -> None:
    """A forward of 2,048 tokens ends inside the second and the fourth of prompts of 1,272."""
    assert [most_checkpoints(1272, 2048, count) for count in range(1, 5)] == [4, 10, 14, 20]
    assert most_checkpoints(1024, 2048, 2) == 2 * most_checkpoints(1024, 2048)
    long = [cut_lengths(0, 2048, 0), cut_lengths(2048, 2552, 2040)]
    assert most_checkpoints(2552, 2048) == sum(map(len, long))


def test_what_is_dropped_is_what_costs_least_to_compute_again() -> None:
    kept = kept_at(100, 500, 550, 1000)
    kept.thin(3)
    assert lengths_of(kept) == [1000, 550, 100]


def test_checkpoints_get_sparser_away_from_the_end() -> None:
    kept = kept_at(*range(512, 32_768, 512))
    kept.thin(12)
    lengths = [*lengths_of(kept), 0]
    gaps = [a - b for a, b in itertools.pairwise(lengths)]
    assert len(lengths) == 13
    assert lengths[0] == 32_256
    assert gaps[0] == 512
    assert gaps[-1] >= 4 * gaps[0]
    assert sum(gaps[:6]) < sum(gaps[6:]) / 2


def test_a_slot_loses_its_last_checkpoint_when_no_other_is_left() -> None:
    kept = KeptCheckpoints(3)
    for slot in (1, 0, 2):
        for length in (100, 200):
            kept.add(slot, length, [torch.zeros(1, dtype=torch.int8)])
    kept.thin(3)
    assert [kept.newest(slot) for slot in range(3)] == [200, 200, 200]
    kept.thin(2)
    assert [kept.newest(slot) for slot in range(3)] == [200, 0, 200]  # the oldest


def test_checkpoints_that_slots_share_count_once() -> None:
    kept = KeptCheckpoints(2)
    kept.add(0, 100, [torch.zeros(4)])
    kept.add(0, 200, [torch.zeros(4)])
    kept.copy(0, 1, 150)
    assert kept.num_bytes == 32
    assert lengths_of(kept, 1) == [100]
    kept.thin(16)
    assert lengths_of(kept) == [200]


def test_pieces_are_cut_in_their_order() -> None:
    pieces = pieces_of(memoryview(bytearray(b"abcdef")), [2, 1, 3])
    assert [bytes(piece.tolist()) for piece in pieces] == [b"ab", b"c", b"def"]


@pytest.mark.parametrize("size", [5, 7])
def test_bytes_of_another_number_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} bytes of keys, values or states, expected 6"):
        pieces_of(memoryview(bytearray(size)), [2, 4])
