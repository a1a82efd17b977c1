"""Tests of CRC32C by instruction and by table, against a loop over bits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tandem.kernels import _native

SUMS = (_native.crc32c, _native.crc32c_portable)
# Lengths around the start of three streams, and with remainders.
LONG = (12_287, 12_288, 12_289, 13_055, 16_384, 100_003)

of_both = pytest.mark.parametrize("sum_of", SUMS)


def bit_at_a_time(data: bytes, before: int = 0) -> int:
    state = before ^ 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def drawn(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(256, (count,), dtype=torch.uint8, generator=generator)


@of_both
def test_published_values(sum_of: Callable[[Tensor, int], int]) -> None:
    # The check value of the CRC catalogue, and of RFC 3720, B.4.
    digits = torch.tensor(list(b"123456789"), dtype=torch.uint8)
    assert sum_of(digits, 0) == 0xE3069283
    assert sum_of(torch.zeros(32, dtype=torch.uint8), 0) == 0x8A9136AA
    assert sum_of(torch.full((32,), 255, dtype=torch.uint8), 0) == 0x62A8AB43


@of_both
def test_every_length_at_every_place(sum_of: Callable[[Tensor, int], int]) -> None:
    data = drawn(80)
    for start in range(9):
        for length in range(65):
            piece = data[start : start + length]
            assert sum_of(piece, 7) == bit_at_a_time(piece.numpy().tobytes(), 7)


@of_both
@pytest.mark.parametrize("length", LONG)
def test_long_pieces(sum_of: Callable[[Tensor, int], int], length: int) -> None:
    data = drawn(length + 3)
    expected = bit_at_a_time(data[3:].numpy().tobytes())
    assert sum_of(data[3:], 0) == expected
    assert sum_of(data[5003:], sum_of(data[3:5003], 0)) == expected


def test_two_pieces_are_joined() -> None:
    data = drawn(5000)
    whole = _native.crc32c(data, 0)
    for at in (0, 1, 8, 4096, 4999, 5000):
        first, second = _native.crc32c(data[:at], 0), _native.crc32c(data[at:], 0)
        assert _native.join_crc32c(first, second, 5000 - at) == whole
    with pytest.raises(ValueError, match="at least 0 bytes"):
        _native.join_crc32c(1, 2, -1)
