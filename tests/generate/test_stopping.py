"""Tests of stop strings: none of it is emitted, all text before it is, however it is split."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.generate.stopping import StopStrings

ALPHABET = "abc"


def given_out(stop: StopStrings, pieces: list[str]) -> str:
    return "".join(stop.add(piece) for piece in pieces) + stop.finish()


@given(
    st.lists(st.text(ALPHABET, max_size=4), max_size=12),
    st.lists(st.text(ALPHABET, min_size=1, max_size=3), max_size=3),
)
def test_text_ends_before_the_first_stop_string(pieces: list[str], strings: list[str]) -> None:
    stop = StopStrings(strings)
    text, out = "".join(pieces), given_out(stop, pieces)
    assert text.startswith(out)
    assert stop.is_met == any(string in text for string in strings)
    assert not any(string in out for string in strings)
    if not stop.is_met:
        assert out == text


@given(st.lists(st.text(ALPHABET, max_size=4), max_size=12), st.text(ALPHABET, min_size=1))
def test_one_string_cuts_where_it_begins(pieces: list[str], string: str) -> None:
    assert given_out(StopStrings([string]), pieces) == "".join(pieces).partition(string)[0]


def test_text_that_cannot_become_a_stop_string_is_not_held() -> None:
    stop = StopStrings(["<end>"])
    assert stop.add("a <e") == "a "
    assert stop.add("x") == "<ex"
