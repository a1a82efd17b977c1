"""The layout serves a GPU: a Triton reader, run in Triton's interpreter, gives what unpack gives.

Skipped only where Triton cannot be imported; it comes with CUDA builds of torch, not with CPU ones.
"""

import os
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tandem.kernels.formats import find_format, pack, unpack
from tests.kernels.formats.sources import draw_weights

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def reader() -> Iterator[ModuleType]:
    """Import the kernels while Triton interprets: it decides when a kernel is decorated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TRITON_INTERPRET", "1")
        from tests.kernels.formats import triton_reader

        yield triton_reader


@pytest.mark.parametrize("shape", [(16, 32), (48, 256), (37, 75)], ids=str)
@pytest.mark.parametrize("name", ["int4-g32", "bf16"])
def test_triton_reads_the_same_matrix(
    reader: ModuleType, name: str, shape: tuple[int, int]
) -> None:
    fmt = find_format(name)
    packed = pack(draw_weights(*shape), fmt)
    rows = fmt.padded_rows(shape[0])
    cols = -(-shape[1] // 32) * 32  # tiles are 32 wide; bf16's own padding is 8
    if fmt.padded_cols(shape[1]) != cols:
        packed = pack(torch.nn.functional.pad(draw_weights(*shape), (0, cols - shape[1])), fmt)
    x = torch.randn(cols, generator=torch.Generator().manual_seed(5))
    out, tiles = torch.empty(rows), torch.empty(rows, cols)
    words = packed.data.view(torch.int32)
    scales = words if packed.scales is None else packed.scales
    reader.packed_matvec[(rows // 16,)](words, scales, x, out, tiles, cols, name != "bf16")
    expected = torch.zeros(rows, cols)
    expected[: shape[0], : packed.cols] = unpack(packed)
    assert torch.equal(tiles, expected)
    torch.testing.assert_close(out, expected @ x, rtol=1e-5, atol=1e-5)
