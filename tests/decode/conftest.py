"""What several tests of decode steps use."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kernels.interpreter import interpreted


@pytest.fixture(scope="module")
def find_kernels() -> Iterator[Any]:
    """Return what finds the kernels of decode attention, in Triton's interpreter."""
    pytest.importorskip("triton")
    with interpreted():
        from tandem.triton_kernels.decode_attention import DecodeAttention

        yield lambda device: DecodeAttention(1)
