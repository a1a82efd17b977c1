import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.errors import ConfigError
from tandem.core.units import format_bytes, parse_bandwidth, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 * 2**30),
        ("300MB", 300 * 10**6),
        ("1.5g", 1_500_000_000),
        ("4096", 4096),
        (" 2 kib ", 2048),
        (7, 7),
    ],
)
def test_sizes_as_people_write_them(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "8 apples", "GiB", "1e9", True, -5])
def test_other_sizes_are_refused_by_name(text: str | int) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory is .*; expected a size"):
        parse_bytes(text, name="gpu_memory")


@pytest.mark.parametrize(
    ("text", "expected"), [("4GB/s", 4e9), ("16 GiB/s", 16 * 2**30), (5e9, 5e9), ("100MBps", 1e8)]
)
def test_rates_as_people_write_them(text: str | float, expected: float) -> None:
    assert parse_bandwidth(text) == expected


@pytest.mark.parametrize("text", ["0GB/s", "fast", "-4GB/s", 0, -1.0])
def test_other_rates_are_refused(text: str | float) -> None:
    with pytest.raises(ConfigError, match="expected a"):
        parse_bandwidth(text)


@given(st.integers(0, 2**50))
def test_formatted_sizes_are_read_back_within_rounding(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.006)
