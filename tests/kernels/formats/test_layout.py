"""Tests of the byte layout in docs/formats.md: loops after the text, against tensor views."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from tandem.core.errors import ConfigError
from tandem.kernels.formats import FORMATS, WeightFormat, find_format, pack, unpack
from tandem.kernels.formats.packed import PackedMatrix
from tests.kernels.formats.sources import CODED, SHAPES, draw_weights, drawn_matrix, pack_any

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def by_name(fmt: WeightFormat) -> str:
    return fmt.name


def read_slowly(packed: PackedMatrix, row: int, col: int) -> float:
    """Read one value by the addresses in docs/formats.md, all written out."""
    fmt, data = packed.format, packed.data.numpy().tobytes()
    K = packed.format.padded_cols(packed.cols)  # noqa: N806  the document's name
    b, r = divmod(row, 16)
    if fmt.bits == 16:
        c, i = divmod(col, 2)
        address = (b * K // 2 + c) * 64 + 4 * r + 2 * i
        dtype = torch.bfloat16 if fmt.name == "bf16" else torch.float16
        return packed.data[address : address + 2].view(dtype).item()
    assert fmt.group_size is not None
    assert packed.scales is not None
    g = col // fmt.group_size
    if fmt.bits == 8:
        c, i = divmod(col, 4)
        code = data[(b * K // 4 + c) * 64 + 4 * r + i]
    elif fmt.bits == 4:
        c, place = divmod(col, 8)
        i, is_high = place % 4, place >= 4
        byte = data[(b * K // 8 + c) * 64 + 4 * r + i]
        code = byte >> 4 if is_high else byte & 15
    else:
        code = _joined(data[(b * K + col // 32 * 32) * 2 * fmt.bits :], fmt.bits, r, col % 32)
    if fmt.kind == "nvfp4":
        return _nvfp4_value(code, packed.scales[b * (64 + K) :], col, r)
    if fmt.encoding.super_cols:
        return _super_value(fmt, code, packed.scales, b * K + col, r)
    line = b * K // fmt.group_size + g
    return _value(fmt, code, packed.scales, line, r)


def _joined(strip: bytes, bits: int, r: int, col: int) -> int:
    """Read a code whose bits are in planes of 4, 2 and 1 bits."""
    code = place = 0
    for width in (4, 2, 1):
        if bits & width:
            line, field = divmod(col // 4, 8 // width)
            byte = strip[64 * line + 4 * r + col % 4]
            code |= (byte >> width * field) % (1 << width) << place
            place += width
            strip = strip[64 * width :]
    return code


def _super_value(fmt: WeightFormat, code: int, scales: Tensor, col: int, r: int) -> float:
    """Decode a value with a super-block's scales; `col` counts columns of all blocks."""
    assert fmt.group_size is not None
    s, in_super = divmod(col, 256)
    lines, groups = (2 if fmt.encoding.has_minima else 1), 256 // fmt.group_size
    of_group = 16 if fmt.kind == "q2_k" else 16 * lines
    first = s * (32 * lines + of_group * groups)
    own = first + 32 * lines + of_group * (in_super // fmt.group_size)

    def number(line: int) -> Tensor:
        factor = scales[first + 32 * line + 2 * r :][:2].view(torch.float16).float()
        if fmt.kind == "q2_k":
            return (scales[own + r] >> 4 if line else scales[own + r] & 15).float() * factor
        return scales[own + 16 * line + r].view(torch.int8).float() * factor

    minimum = number(1) if lines == 2 else torch.zeros(1)
    return (_number(fmt, code) * number(0) + minimum).item()


def _number(fmt: WeightFormat, code: int) -> float:
    """Return the number that a code stands for before scaling."""
    if fmt.kind.startswith("iq4"):
        return IQ4[code]
    return code - fmt.encoding.offset


def _nvfp4_value(code: int, block: Tensor, col: int, r: int) -> float:
    """Decode a value with a row's factor and a group's e4m3 scale, in one block of 16 rows."""
    factor = block[4 * r :][:4].view(torch.float32)
    scale = block[64 + col // 16 * 16 + r].view(torch.float8_e4m3fn).float()
    return ((-1.0 if code & 8 else 1.0) * E2M1[code & 7] * (scale * factor)).item()


def _value(fmt: WeightFormat, code: int, scales: Tensor, line: int, r: int) -> float:
    if fmt.kind == "iq4_nl":
        return IQ4[code] * scales[line * 16 + r].item()
    if fmt.kind == "int5":
        return (code - 16) * scales[line * 16 + r].item()
    if fmt.kind == "int4":
        return (code - 8) * scales[line * 16 + r].item()
    if fmt.kind == "int8":
        return (code - 128) * scales[line * 16 + r].item()
    if fmt.kind == "mxfp4":
        sign = -1.0 if code & 8 else 1.0
        return sign * E2M1[code & 7] * 2.0 ** (scales[line * 16 + r].item() - 127)
    if fmt.kind == "fp8":
        e4m3 = torch.tensor(code, dtype=torch.uint8).view(torch.float8_e4m3fn)
        return (e4m3.float() * scales[line]).item()
    scale, minimum = scales[line * 32 + r].float(), scales[line * 32 + 16 + r].float()
    return (code * scale + minimum).item()


def read_lines(packed: PackedMatrix) -> Tensor:
    """Rebuild the file's blocks, and decode them with the gguf package."""
    fmt, data = packed.format, packed.data.numpy().tobytes()
    assert fmt.encoding.grid is not None
    words = fmt.encoding.grid.words
    scales = b"" if packed.scales is None else packed.scales.numpy().tobytes()
    rows = []
    for row in range(packed.rows):
        b, r = divmod(row, 16)
        blocks = b""
        for s in range(supers := packed.cols // 256):
            at = b * supers + s
            blocks += scales[32 * at + 2 * r :][:2]
            first = 64 * words * at + 4 * r
            blocks += b"".join(data[first + 64 * word :][:4] for word in range(words))
        rows.append(np.frombuffer(blocks, np.uint8))
    kind = GGMLQuantizationType[fmt.name.upper()]
    return torch.from_numpy(dequantize(np.stack(rows), kind))


def read_all_slowly(packed: PackedMatrix) -> Tensor:
    if packed.format.encoding.grid is not None:
        return read_lines(packed)
    values = torch.zeros(packed.rows, packed.cols)
    for row in range(packed.rows):
        for col in range(packed.cols):
            values[row, col] = read_slowly(packed, row, col)
    return values


@pytest.mark.parametrize("shape", [(16, 32), (37, 75), (20, 260)], ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=by_name)
def test_unpack_reads_the_documented_addresses(fmt: WeightFormat, shape: tuple[int, int]) -> None:
    if fmt.encoding.grid is not None:
        shape = shape[0], fmt.padded_cols(shape[1])  # files have whole super-blocks
    packed = pack_any(draw_weights(*shape), fmt)
    assert torch.equal(unpack(packed), read_all_slowly(packed))


@pytest.mark.parametrize("fmt", CODED, ids=by_name)
def test_codes_land_at_the_documented_addresses(fmt: WeightFormat) -> None:
    packed = drawn_matrix(37, 75, fmt)
    assert torch.equal(unpack(packed), read_all_slowly(packed))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=by_name)
def test_sizes_are_those_of_the_padded_matrix(fmt: WeightFormat, shape: tuple[int, int]) -> None:
    packed = PackedMatrix.empty(*shape, fmt)
    rows, cols = -(-shape[0] // 16) * 16, -(-shape[1] // fmt.col_multiple) * fmt.col_multiple
    grid = fmt.encoding.grid
    num_bytes = rows * cols * fmt.bits // 8 if grid is None else rows * cols // 64 * grid.words
    assert packed.data.nbytes == num_bytes == fmt.data_bytes(*shape)
    assert (0 if packed.scales is None else packed.scales.nbytes) == fmt.scale_bytes(*shape)
    of_rows = 4 * rows if fmt.kind == "nvfp4" else 0
    total = 8 * (fmt.data_bytes(*shape) + fmt.scale_bytes(*shape) - of_rows)
    assert total == pytest.approx(rows * cols * fmt.bits_per_weight)
    assert grid is not None or unpack(pack(draw_weights(*shape), fmt)).shape == shape


@pytest.mark.parametrize("fmt", FORMATS, ids=by_name)
def test_padding_decodes_to_zero(fmt: WeightFormat) -> None:
    packed = pack_any(draw_weights(18, 70), fmt)
    rows, cols = fmt.padded_rows(18), fmt.padded_cols(70)
    whole = unpack(PackedMatrix(fmt, rows, cols, packed.data, packed.scales))
    assert torch.equal(whole[18:], torch.zeros(rows - 18, cols))
    if fmt.encoding.has_zero:  # zero need not be among its values
        assert torch.equal(whole[:, 70:], torch.zeros(rows, cols - 70))


def test_every_format_is_found_by_its_name() -> None:
    assert [find_format(fmt.name) for fmt in FORMATS] == list(FORMATS)


@pytest.mark.parametrize(
    ("alias", "name"), [("int4", "int4-g32"), ("int8", "int8-g128"), ("int4z", "int4z-g32")]
)
def test_aliases(alias: str, name: str) -> None:
    assert find_format(alias).name == name


def test_an_unknown_name_is_told_its_neighbours() -> None:
    with pytest.raises(ConfigError, match=r"unknown weight format 'mxpf4'; did you mean 'mxfp4'"):
        find_format("mxpf4")
