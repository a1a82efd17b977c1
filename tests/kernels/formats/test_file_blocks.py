"""Blocks of GGUF files: the values of the gguf package, read in torch and rearranged natively."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from tandem.checkpoint.sources.gguf_blocks import FORMATS as OF_BLOCKS
from tandem.checkpoint.sources.gguf_blocks import read_blocks
from tandem.core.errors import ModelError
from tandem.kernels.formats import PackedMatrix, find_format, unpack
from tandem.kernels.formats.file_blocks import (
    FileBlocks,
    Placing,
    has_file_blocks,
    write_file_blocks,
)
from tandem.kernels.formats.packed import write_codes
from tests.loading.gguf_files import FACTORS

IN_FILES = [kind for kind, name in OF_BLOCKS.items() if has_file_blocks(find_format(name))]
# A code that is looked up in a grid takes more bits where each has its own.
OF_GRIDS = ("IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S")
# Six bits of a scale become a byte, in the smallest of these.
MOST_BYTES = dict.fromkeys(OF_BLOCKS, 1.03) | {"Q3_K": 1.04} | dict.fromkeys(OF_GRIDS, 1.61)
_OF_32 = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)}


def draw_blocks(kind: str, rows: int, supers: int) -> NDArray[np.uint8]:
    """Draw (rows, bytes) of 256 numbers each: any byte, but factors that are no NaN."""
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    shape = (rows, supers * 256 // numbers, size)
    drawn = np.random.default_rng(rows).integers(0, 256, shape, dtype=np.uint8)
    for place in (FACTORS | _OF_32).get(kind, ()):
        drawn[..., place + 1] &= 0xBF  # exponents below fp16's largest
    if kind == "MXFP4":
        drawn[..., 0] %= 250
    if kind == "NVFP4":
        drawn[..., :4] &= 0x7F
    return drawn.reshape(rows, -1)


def rearranged(kind: str, source: FileBlocks, supers: int) -> PackedMatrix:
    fmt = find_format(OF_BLOCKS[kind])
    packed = PackedMatrix.empty(len(source.rows), 256 * supers, fmt)
    packed.data.fill_(0xA5)
    assert packed.scales is not None
    packed.scales.fill_(0xA5)
    write_file_blocks([Placing(packed.blocks, fmt, source)])
    return packed


def by_codes(kind: str, source: NDArray[np.uint8], supers: int) -> PackedMatrix:
    fmt = find_format(OF_BLOCKS[kind])
    packed = PackedMatrix.empty(len(source), 256 * supers, fmt)
    coded = read_blocks(source, GGMLQuantizationType[kind], keep=True).coded(fmt, "weight")
    write_codes(packed.blocks, fmt, coded)
    return packed


def test_blocks_of_most_files_are_rearranged_natively() -> None:
    assert set(IN_FILES) == {
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "IQ4_NL"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"),
    }


@pytest.mark.parametrize(("rows", "supers"), [(16, 1), (37, 3)])
@pytest.mark.parametrize("kind", OF_BLOCKS)
def test_values_are_those_of_the_gguf_package(kind: str, rows: int, supers: int) -> None:
    source = draw_blocks(kind, rows, supers)
    expected = torch.from_numpy(dequantize(source, GGMLQuantizationType[kind]))
    codes = by_codes(kind, source, supers)
    assert torch.equal(unpack(codes), expected)
    read = read_blocks(source, GGMLQuantizationType[kind], keep=True)
    assert torch.equal(read.values("weight"), expected)
    if kind in IN_FILES:
        packed = rearranged(kind, FileBlocks(source), supers)
        assert codes.scales is not None
        assert packed.scales is not None
        assert torch.equal(packed.data, codes.data)
        assert torch.equal(packed.scales, codes.scales)


@pytest.mark.parametrize("kind", OF_BLOCKS)
def test_few_bytes_more_than_the_file(kind: str) -> None:
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    fmt = find_format(OF_BLOCKS[kind])
    assert fmt.bits_per_weight <= MOST_BYTES[kind] * 8 * size / numbers


def test_rows_in_another_order() -> None:
    order = torch.randperm(20)
    source = draw_blocks("Q6_K", 20, 2)
    ordered = unpack(rearranged("Q6_K", FileBlocks(source, order), 2))
    assert torch.equal(ordered, unpack(rearranged("Q6_K", FileBlocks(source), 2))[order])


@pytest.mark.parametrize("kind", FACTORS)
def test_a_scale_that_is_not_finite(kind: str) -> None:
    source, fmt = draw_blocks(kind, 20, 2), find_format(OF_BLOCKS[kind])
    for place in FACTORS[kind]:
        damaged = source.copy()
        damaged[17, place : place + 2] = (0, 0x7C)  # infinity
        if kind in IN_FILES:
            with pytest.raises(ModelError, match=r"weight's scales hold NaN or infinity"):
                rearranged(kind, FileBlocks(damaged), 2)
        with (
            pytest.raises(ModelError, match=r"weight's scales hold NaN or infinity"),
            np.errstate(invalid="ignore"),
        ):
            read_blocks(damaged, GGMLQuantizationType[kind], keep=True).coded(fmt, "weight")


def test_many_matrices_in_one_call_are_those_of_one_each() -> None:
    kinds = ["Q4_K", "Q6_K", "Q4_K", "IQ4_XS"]
    sources = [draw_blocks(kind, 40 + 700 * i, i + 1) for i, kind in enumerate(kinds)]
    alone = [
        rearranged(kind, FileBlocks(source), i + 1)
        for i, (kind, source) in enumerate(zip(kinds, sources, strict=True))
    ]
    placings = [
        Placing(empty.blocks, empty.format, FileBlocks(source), f"matrix {i}")
        for i, (one, source) in enumerate(zip(alone, sources, strict=True))
        if (empty := PackedMatrix.empty(one.rows, one.cols, one.format))
    ]
    write_file_blocks(placings)
    for placing, one in zip(placings, alone, strict=True):
        assert placing.blocks.scales is not None
        assert one.blocks.scales is not None
        assert torch.equal(placing.blocks.words, one.blocks.words)
        assert torch.equal(placing.blocks.scales, one.blocks.scales)
    sources[2][1300, :2] = (0, 0x7C)  # infinity
    with pytest.raises(ModelError, match=r"matrix 2's scales hold NaN or infinity"):
        write_file_blocks(placings)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "IQ4_NL"])
def test_rows_of_few_blocks_of_32(kind: str) -> None:
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    source = np.ascontiguousarray(draw_blocks(kind, 21, 1)[:, : 3 * size])
    fmt = find_format(OF_BLOCKS[kind])
    packed = PackedMatrix.empty(21, 96, fmt)
    write_file_blocks([Placing(packed.blocks, fmt, FileBlocks(source))])
    expected = torch.from_numpy(dequantize(source, GGMLQuantizationType[kind]))
    assert torch.equal(unpack(packed), expected)
