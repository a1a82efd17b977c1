"""One weight matrix as a quantised checkpoint stores it: codes, scales and their meaning."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.kernels.formats import CodedMatrix, WeightFormat, coded_matrix, find_format
from tandem.kernels.formats.codes import decode
from tandem.kernels.formats.source_codes import stored_matrix

GROUP_SIZES = (128, 64, 32)  # of the packed formats, fewest scales first


@dataclass(frozen=True, slots=True)
class Codes:
    """A (rows, cols) matrix as codes and scales; rows are the outputs.

    `kind` says what `codes` are. "int": whole numbers with value = (code - zero) * scale. "mxfp4":
    uint8 e2m1 bits. "fp8": float8_e4m3fn. For a format with super-blocks or a table, `kind` is the
    format's name and the codes are uint8 as stored. `scales` is (rows, groups); for fp8 it is
    (rows / 128, cols / 128), rounded up. `zeros` has the shape of `scales`; None for signed codes.
    With super-blocks, scales and minima are int8, with fp16 factors (rows, super-blocks); for
    nvfp4, scales are e4m3 as uint8, with one fp32 factor per row. `input_order` (cols,) has, for
    each column, the number of the layer's input; None if column i is for input i.
    """

    kind: str
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    input_order: Tensor | None = None
    minima: Tensor | None = None
    """Minima (rows, groups) in place of zero points: value = code * scale + minimum."""
    super_scales: Tensor | None = None
    super_minima: Tensor | None = None

    def coded(self, fmt: WeightFormat, name: str) -> CodedMatrix:
        """Return the codes and scales in the form of `fmt`; `ModelError` if they do not fit."""
        if self.super_scales is not None or fmt.encoding.table:
            assert fmt.name == self.kind, "stored codes fit one format"
            return stored_matrix(
                CodedMatrix(
                    self.codes, self.scales, self.minima, self.super_scales, self.super_minima
                ),
                name,
            )
        if self.kind != "int":
            return coded_matrix(self.codes, self.scales, fmt, name=name)
        if self.minima is not None:
            no_zeros = torch.zeros(self.scales.shape, device="cpu")
            coded = coded_matrix(self.codes, self.scales, fmt, zeros=no_zeros, name=name)
            return CodedMatrix(coded.codes, coded.scales, self.minima)
        assert fmt.group_size is not None
        scales, zeros = self._in_groups_of(fmt.group_size, name)
        codes = self.codes
        if zeros is not None and not fmt.encoding.has_minima:
            each = zeros.repeat_interleave(fmt.group_size, dim=1)[:, : codes.shape[1]]
            codes, zeros = codes.to(torch.int16) - each.to(torch.int16), None
        return coded_matrix(codes, scales, fmt, zeros=zeros, name=name)

    def values(self, name: str) -> Tensor:
        """Return the dequantised matrix, (rows, cols) fp32, with columns in the inputs' order."""
        values = self._values(name)
        if self.input_order is None:
            return values
        ordered = torch.empty_like(values)
        ordered[:, self.input_order] = values
        return ordered

    def _values(self, name: str) -> Tensor:
        if self.kind != "int":
            fmt = find_format(self.kind)
            coded = self.coded(fmt, name)
            padding = fmt.padded_cols(coded.codes.shape[1]) - coded.codes.shape[1]
            codes = torch.nn.functional.pad(coded.codes, (0, padding))
            values = decode(dataclasses.replace(coded, codes=codes), fmt)
            return values[:, : self.codes.shape[1]]
        if not self.scales.isfinite().all():
            raise ModelError(
                f"{name}'s scales hold NaN or infinity, expected finite numbers; the checkpoint "
                "is damaged: download or convert it again"
            )
        cols, groups = self.codes.shape[1], self.scales.shape[1]
        size = _group_size(cols, groups, name)
        values = self.codes.float()
        if self.zeros is not None:
            values -= self.zeros.float().repeat_interleave(size, dim=1)[:, :cols]
        values = values * self.scales.float().repeat_interleave(size, dim=1)[:, :cols]
        if self.minima is not None:
            values += self.minima.float().repeat_interleave(size, dim=1)[:, :cols]
        return values

    def _in_groups_of(self, size: int, name: str) -> tuple[Tensor, Tensor | None]:
        """Return scales and zero points (or None), repeated so that each is for `size` columns."""
        source = _group_size(self.codes.shape[1], self.scales.shape[1], name)
        if source % size:
            raise ModelError(
                f"{name} has groups of {source} columns, which do not divide by {size}"
            )
        groups = -(-self.codes.shape[1] // size)
        scales = self.scales.repeat_interleave(source // size, dim=1)[:, :groups]
        if self.zeros is None:
            return scales, None
        return scales, self.zeros.repeat_interleave(source // size, dim=1)[:, :groups]


def stored_codes(
    coded: CodedMatrix, fmt: WeightFormat, *, input_order: Tensor | None = None
) -> Codes:
    """Return the codes of a packed matrix as a checkpoint would store them."""
    kind, codes = fmt.name, coded.codes
    if fmt.encoding.element == "integer" and not fmt.encoding.super_cols:
        kind, codes = "int", codes.to(torch.int16) - fmt.encoding.offset
    assert coded.scales is not None, "formats without scales have no codes"
    return Codes(
        kind, codes, coded.scales, input_order=input_order, minima=coded.minima,
        super_scales=coded.super_scales, super_minima=coded.super_minima,
    )  # fmt: skip


def integer_formats(
    bits: int, cols: int, group_size: int, *, has_zeros: bool
) -> list[WeightFormat]:
    """Return the packed formats that hold such integer codes exactly, the smallest first.

    A format with smaller groups holds the codes too, as scales may repeat; a single scale for all
    `cols` fits any group size. No format holds 8 bits with zero points, or widths other than 4 and
    8 bits.
    """
    sizes = [size for size in GROUP_SIZES if group_size % size == 0 or group_size >= cols]
    if bits not in (4, 8) or (bits == 8 and has_zeros):
        return []
    kinds = ("int8",) if bits == 8 else ("int4z", "int8") if has_zeros else ("int4", "int8")
    return [find_format(f"{kind}-g{size}") for kind in kinds for size in sizes]


def _group_size(cols: int, groups: int, name: str) -> int:
    if groups < 1 or (groups > 1 and cols % groups):
        raise ModelError(
            f"{name} has {groups} groups of scales for {cols} columns, which do not divide; the "
            "checkpoint was not written for this config"
        )
    size = cols // groups
    # One scale covers all columns, so any group size will do.
    return -(-cols // GROUP_SIZES[0]) * GROUP_SIZES[0] if groups == 1 else size


def input_order(group_of_input: Tensor, group_size: int, name: str) -> Tensor | None:
    """Return the order of inputs that makes groups contiguous; None if they already are.

    The result (cols,) has, for each column, the number of its input. `group_of_input` (cols,) is
    g_idx of checkpoints with activation order. Raises `ModelError` with `name` unless every group
    has `group_size` inputs.
    """
    group_of_input = group_of_input.long()
    inputs = torch.arange(len(group_of_input), device="cpu")
    order = torch.argsort(group_of_input, stable=True)
    if not torch.equal(group_of_input[order], inputs // group_size):
        raise ModelError(
            f"{name} does not put {group_size} inputs into each group; the checkpoint is damaged: "
            "download or convert it again"
        )
    return None if torch.equal(order, inputs) else order


def unpack_bits(words: Tensor, bits: int) -> Tensor:
    """Return the numbers in int32 words, lowest bits first: (..., n) to (..., n * 32 / bits)."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device="cpu")
    numbers = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(-2).to(torch.uint8)


def nibbles(codes: Tensor) -> Tensor:
    """Unpack (..., n) bytes to (..., 2 * n) numbers: each byte's low nibble, then its high one."""
    return torch.stack((codes & 0x0F, codes >> 4), dim=-1).flatten(-2)
