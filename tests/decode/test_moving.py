"""Bytes of keys, values and states that come back are as many as they were."""

import pytest

from tandem.kv_cache.cpu_states import pieces_of


def test_pieces_are_cut_in_their_order() -> None:
    pieces = pieces_of(memoryview(bytearray(b"abcdef")), [2, 1, 3])
    assert [bytes(piece.tolist()) for piece in pieces] == [b"ab", b"c", b"def"]


@pytest.mark.parametrize("size", [5, 7])
def test_bytes_of_another_number_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} bytes of keys, values or states, expected 6"):
        pieces_of(memoryview(bytearray(size)), [2, 4])
