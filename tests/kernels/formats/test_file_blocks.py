"""Blocks of 256 numbers: the values of the gguf package, read in torch and rearranged natively."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from tandem.checkpoint.sources.gguf_blocks import FORMATS as OF_BLOCKS
from tandem.checkpoint.sources.gguf_blocks import read_blocks
from tandem.core.errors import ModelError
from tandem.kernels.formats import FORMATS, PackedMatrix, WeightFormat, find_format, unpack
from tandem.kernels.formats.file_blocks import FileBlocks, has_file_blocks, write_file_blocks
from tandem.kernels.formats.packed import write_codes
from tests.kernels.formats.test_layout import by_name
from tests.loading.gguf_files import FACTORS

IN_FILES = [fmt for fmt in FORMATS if has_file_blocks(fmt)]


def kind_of(fmt: WeightFormat) -> GGMLQuantizationType:
    (name,) = (name for name, found in OF_BLOCKS.items() if found == fmt.name)
    return GGMLQuantizationType[name]


def draw_blocks(fmt: WeightFormat, rows: int, supers: int) -> NDArray[np.uint8]:
    """Draw (rows, bytes): any byte, but factors that are no NaN."""
    size = GGML_QUANT_SIZES[kind_of(fmt)][1]
    drawn = np.random.default_rng(rows).integers(0, 256, (rows, supers, size), dtype=np.uint8)
    for place in FACTORS[kind_of(fmt).name]:
        drawn[..., place + 1] &= 0xBF  # exponents below fp16's largest
    return drawn.reshape(rows, -1)


def rearranged(fmt: WeightFormat, source: FileBlocks, supers: int) -> PackedMatrix:
    packed = PackedMatrix.empty(len(source.rows), 256 * supers, fmt)
    packed.data.fill_(0xA5)
    assert packed.scales is not None
    packed.scales.fill_(0xA5)
    write_file_blocks(packed.blocks, fmt, source)
    return packed


def test_all_super_blocks_can_be_rearranged() -> None:
    assert {fmt.name for fmt in IN_FILES} == {f.name for f in FORMATS if f.encoding.super_cols}


@pytest.mark.parametrize(("rows", "supers"), [(16, 1), (37, 3)])
@pytest.mark.parametrize("fmt", IN_FILES, ids=by_name)
def test_values_are_those_of_the_gguf_package(fmt: WeightFormat, rows: int, supers: int) -> None:
    source = draw_blocks(fmt, rows, supers)
    expected = torch.from_numpy(dequantize(source, kind_of(fmt)))
    packed = rearranged(fmt, FileBlocks(source), supers)
    assert torch.equal(unpack(packed), expected)
    by_codes = PackedMatrix.empty(rows, 256 * supers, fmt)
    coded = read_blocks(source, kind_of(fmt), keep=True).coded(fmt, "weight")
    write_codes(by_codes.blocks, fmt, coded)
    assert torch.equal(by_codes.data, packed.data)
    assert by_codes.scales is not None
    assert packed.scales is not None
    assert torch.equal(by_codes.scales, packed.scales)


@pytest.mark.parametrize("fmt", IN_FILES, ids=by_name)
def test_at_most_three_percent_more_than_the_file(fmt: WeightFormat) -> None:
    numbers, size = GGML_QUANT_SIZES[kind_of(fmt)]
    assert fmt.bits_per_weight <= 1.03 * 8 * size / numbers


def test_rows_in_another_order() -> None:
    fmt, order = find_format("q6_k"), torch.randperm(20)
    source = draw_blocks(fmt, 20, 2)
    ordered = unpack(rearranged(fmt, FileBlocks(source, order), 2))
    assert torch.equal(ordered, unpack(rearranged(fmt, FileBlocks(source), 2))[order])


@pytest.mark.parametrize("fmt", IN_FILES, ids=by_name)
def test_a_scale_that_is_not_finite(fmt: WeightFormat) -> None:
    source = draw_blocks(fmt, 20, 2)
    for place in FACTORS[kind_of(fmt).name]:
        damaged = source.copy()
        damaged[17, place : place + 2] = (0, 0x7C)  # infinity
        with pytest.raises(ModelError, match=r"weight's scales hold NaN or infinity"):
            rearranged(fmt, FileBlocks(damaged), 2)
        with pytest.raises(ModelError, match=r"weight's scales hold NaN or infinity"):
            read_blocks(damaged, kind_of(fmt), keep=True).coded(fmt, "weight")
