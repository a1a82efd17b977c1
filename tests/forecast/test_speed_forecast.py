"""A short prefix of a model's layers is timed, and the whole model is extrapolated from it."""

import pytest

from tandem.forecast.speed_forecast import extrapolate, prefixes_to_time


def as_kinds(pattern: str) -> list[tuple[bool, str]]:
    """Return a letter for each layer; capital ones hold experts."""
    return [(letter.isupper(), letter) for letter in pattern]


@pytest.mark.parametrize(
    ("pattern", "prefixes"),
    [
        ("A" * 48, [2, 12]),
        ("a" + "B" * 26, [2, 12]),
        ("aaa" + "B" * 58, [4, 14]),
        ("LLLF" * 10, [4, 12]),
        ("mEmEm*EmEmEm*EmEmEm*EmEmEm*EmEmEm*EmEmEmEm*EmEmEmEmE", [6, 15]),
        ("A" * 5, [2, 5]),
        ("AB", [1, 2]),
        ("A" * 20 + "B", [2, 12]),  # no other layer is like the last one
    ],
)
def test_the_shortest_prefix_with_each_kind_is_timed(pattern: str, prefixes: list[int]) -> None:
    assert prefixes_to_time(as_kinds(pattern), 1000) == prefixes


@pytest.mark.parametrize("room", range(3, 30))
@pytest.mark.parametrize("pattern", ["A" * 48, "aaa" + "B" * 40, "LLLF" * 10])
def test_prefixes_fit_into_the_room(pattern: str, room: int) -> None:
    kinds = as_kinds(pattern)
    few, more = prefixes_to_time(kinds, room)
    assert 0 < few < more <= len(kinds)
    assert sum(has for n in (few, more) for has, _ in kinds[:n]) <= room


def test_layers_are_extrapolated_in_a_straight_line() -> None:
    assert extrapolate((2, 1.0), (6, 2.0), 48) == pytest.approx(2.0 + 42 * 0.25)
    assert extrapolate((4, 1.0), (4, 1.0), 4) == 1.0
    assert extrapolate((2, 1.0), (6, 0.9), 48) == 0.9  # noise must not make it faster
