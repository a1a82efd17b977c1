"""Tests of streamed text: its pieces sum to the whole, and no piece has half a character."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.generate.text import TextStream


class ByteTokenizer:
    """One token per byte of UTF-8, as byte-level tokenizers have for rare characters."""

    def decode(self, ids: list[int], **options: bool) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


@given(st.text())
def test_pieces_sum_to_the_text(text: str) -> None:
    stream = TextStream(ByteTokenizer())
    pieces = [stream.add(byte) for byte in text.encode()]
    assert "".join(pieces) + stream.finish() == text


@given(st.text(alphabet="aé€😀", min_size=1))
def test_no_piece_holds_half_a_character(text: str) -> None:
    stream = TextStream(ByteTokenizer())
    for byte in text.encode():
        assert "\N{REPLACEMENT CHARACTER}" not in stream.add(byte)


def test_bytes_that_never_become_text_are_not_held_for_ever() -> None:
    stream = TextStream(ByteTokenizer())
    pieces = [stream.add(0xFF) for _ in range(20)]
    assert any(pieces)


def test_an_unfinished_character_comes_at_the_end() -> None:
    stream = TextStream(ByteTokenizer())
    assert stream.add("€".encode()[0]) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"
