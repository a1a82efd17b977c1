"""What several tests of decode steps use."""

from collections.abc import Iterator
from typing import Any

import pytest

from tandem.kernels.dense import CpuThreads
from tests.kernels.interpreter import interpreted
from tests.threads import two_threads


@pytest.fixture(scope="module")
def threads(isa: str) -> CpuThreads:
    """Threads of the instruction set that is asked for, or of the best."""
    return two_threads()


@pytest.fixture(scope="module")
def find_kernels() -> Iterator[Any]:
    """Return what finds the kernels of decode attention, in Triton's interpreter."""
    pytest.importorskip("triton")
    with interpreted():
        from tandem.triton_kernels.decode_attention import DecodeAttention

        yield lambda device: DecodeAttention(1)
