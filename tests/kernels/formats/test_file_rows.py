"""Tests of the native reordering of GGUF blocks, against the gguf package."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from tandem.checkpoint.sources.gguf_blocks import FORMATS as OF_BLOCKS
from tandem.checkpoint.sources.gguf_blocks import code_table, common_format
from tandem.core.errors import ModelError
from tandem.kernels.formats import PackedMatrix, WeightFormat, find_format, unpack
from tandem.kernels.formats.file_rows import FileBlocks, Placing, write_file_rows
from tests.loading.gguf_files import FACTORS

# A format with a grid takes as many bytes as in the file.
OF_GRIDS = ("IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M")
# Six bits of a scale become a byte, in the smallest of these.
MOST_BYTES = dict.fromkeys(OF_BLOCKS, 1.03) | {"Q3_K": 1.04} | dict.fromkeys(OF_GRIDS, 1)
_OF_32 = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)}


def draw_blocks(kind: str, rows: int, supers: int) -> NDArray[np.uint8]:
    """Return random rows of GGUF blocks (rows, bytes): any bytes, but finite factors."""
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    shape = (rows, supers * 256 // numbers, size)
    drawn = np.random.default_rng(rows).integers(0, 256, shape, dtype=np.uint8)
    for place in (FACTORS | _OF_32).get(kind, ()):
        drawn[..., place + 1] &= 0xBF  # exponents below fp16's largest
    if kind == "IQ1_M":
        drawn[..., 55] &= 0xBF  # the highest part of the factor
    if kind == "MXFP4":
        drawn[..., 0] %= 250
    if kind == "NVFP4":
        drawn[..., :4] &= 0x7F
    return drawn.reshape(rows, shape[1] * size)


def blocks_of(
    kind: str, source: NDArray[np.uint8], fmt: WeightFormat | None = None, **more: torch.Tensor
) -> FileBlocks:
    fmt = fmt or find_format(OF_BLOCKS[kind])
    number = GGMLQuantizationType[kind].value
    return FileBlocks(source, number, table=code_table(kind, fmt), **more)


def rearranged(kind: str, source: FileBlocks, fmt: WeightFormat | None = None) -> PackedMatrix:
    fmt = fmt or find_format(OF_BLOCKS[kind])
    packed = PackedMatrix.empty(source.num_rows, source.num_cols, fmt)
    packed.data.fill_(0xA5)
    if packed.scales is not None:
        packed.scales.view(torch.uint8).fill_(0xA5)
    write_file_rows([Placing(packed.blocks, fmt, source)])
    return packed


def values_of(kind: str, source: NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(dequantize(source, GGMLQuantizationType[kind]))


def padding_of(packed: PackedMatrix) -> torch.Tensor:
    """Return the values of the padding rows at the end."""
    fmt = packed.format
    rows = fmt.padded_rows(packed.rows)
    whole = PackedMatrix(fmt, rows, packed.cols, packed.data, packed.scales)
    return unpack(whole)[packed.rows :]


@pytest.mark.parametrize(("rows", "supers"), [(16, 1), (37, 3), (1, 1)])
@pytest.mark.parametrize("kind", OF_BLOCKS)
def test_values_are_those_of_the_gguf_package(kind: str, rows: int, supers: int) -> None:
    source = draw_blocks(kind, rows, supers)
    packed = rearranged(kind, blocks_of(kind, source))
    assert torch.equal(unpack(packed), values_of(kind, source))
    assert (padding_of(packed) == 0).all()


WIDENED = [
    *(("Q4_0", "Q5_0"), ("Q4_0", "Q8_0"), ("Q5_0", "Q8_0"), ("IQ4_NL", "Q8_0"), ("Q4_1", "Q5_1")),
    *(("Q4_K", "Q5_K"), ("Q3_K", "Q6_K")),
]


@pytest.mark.parametrize(("kind", "other"), WIDENED)
def test_values_in_the_format_of_another_type(kind: str, other: str) -> None:
    fmt = common_format([kind, other])
    assert fmt == find_format(OF_BLOCKS[other])
    source = draw_blocks(kind, 21, 2)
    packed = rearranged(kind, blocks_of(kind, source, fmt), fmt)
    assert torch.equal(unpack(packed), values_of(kind, source))
    assert (padding_of(packed) == 0).all()


def test_a_factor_of_all_values() -> None:
    source = draw_blocks("NVFP4", 20, 2)
    factor = torch.tensor(0.37)
    packed = rearranged("NVFP4", blocks_of("NVFP4", source, factor=factor))
    assert packed.scales is not None
    expected = values_of("NVFP4", source) * factor
    torch.testing.assert_close(unpack(packed), expected, rtol=2e-7, atol=0)
    with pytest.raises(ModelError, match=r"weight's scales hold NaN or infinity"):
        rearranged("NVFP4", blocks_of("NVFP4", source, factor=factor * torch.inf))


@pytest.mark.parametrize("kind", OF_BLOCKS)
def test_few_bytes_more_than_the_file(kind: str) -> None:
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    fmt = find_format(OF_BLOCKS[kind])
    assert fmt.bits_per_weight <= MOST_BYTES[kind] * 8 * size / numbers


def test_rows_in_another_order() -> None:
    order = torch.randperm(20)
    source = draw_blocks("Q6_K", 20, 2)
    ordered = unpack(rearranged("Q6_K", blocks_of("Q6_K", source, order=order)))
    assert torch.equal(ordered, unpack(rearranged("Q6_K", blocks_of("Q6_K", source)))[order])


@pytest.mark.parametrize("kind", FACTORS)
def test_a_scale_that_is_not_finite(kind: str) -> None:
    source = draw_blocks(kind, 20, 2)
    for place in FACTORS[kind]:
        damaged = source.copy()
        damaged[17, place : place + 2] = (0, 0x7C)  # infinity
        with pytest.raises(ModelError, match=r"weight's scales hold NaN or infinity"):
            rearranged(kind, blocks_of(kind, damaged))


def test_many_matrices_in_one_call_are_those_of_one_each() -> None:
    kinds = ["Q4_K", "Q6_K", "IQ2_XS", "NVFP4"]
    sources = [draw_blocks(kind, 40 + 700 * i, i + 1) for i, kind in enumerate(kinds)]
    blocks = [blocks_of(kind, source) for kind, source in zip(kinds, sources, strict=True)]
    alone = [rearranged(kind, one) for kind, one in zip(kinds, blocks, strict=True)]
    placings = [
        Placing(empty.blocks, empty.format, source, f"matrix {i}")
        for i, (one, source) in enumerate(zip(alone, blocks, strict=True))
        if (empty := PackedMatrix.empty(one.rows, one.cols, one.format))
    ]
    write_file_rows(placings)
    for placing, one in zip(placings, alone, strict=True):
        assert placing.blocks.scales is not None
        assert one.blocks.scales is not None
        assert torch.equal(placing.blocks.words, one.blocks.words)
        assert torch.equal(placing.blocks.scales, one.blocks.scales)
    sources[2][1300, :2] = (0, 0x7C)  # infinity
    with pytest.raises(ModelError, match=r"matrix 2's scales hold NaN or infinity"):
        write_file_rows(placings)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "IQ4_NL"])
def test_rows_of_few_blocks_of_32(kind: str) -> None:
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    source = np.ascontiguousarray(draw_blocks(kind, 21, 1)[:, : 3 * size])
    assert torch.equal(unpack(rearranged(kind, blocks_of(kind, source))), values_of(kind, source))
