"""compressed-tensors checkpoints: packed integers, int8, FP8 and NVFP4, as llm-compressor writes.

Packed: `x.weight_packed` (outputs, inputs * bits / 32) int32, lowest bits first, codes plus half
their range; `x.weight_scale` (outputs, groups); `x.weight_zero_point` (outputs * bits / 32,
groups), packed along the outputs; `x.weight_g_idx` (inputs,), the group of each input;
`x.weight_shape`.
Plain: `x.weight` int8 or float8 with `x.weight_scale`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.checkpoint.json_files import JsonObject
from tandem.checkpoint.sources.codes import (
    Codes,
    input_order,
    integer_formats,
    unpack_bits,
)
from tandem.checkpoint.sources.files import TensorFiles
from tandem.checkpoint.sources.found import FileWeight, Found
from tandem.checkpoint.sources.fp8 import find_fp8
from tandem.checkpoint.sources.nvfp4 import find_nvfp4
from tandem.core.errors import ModelError, UnsupportedModelError
from tandem.kernels.formats import WeightFormat
from tandem.kernels.formats.file_rows import FileFields
from tandem.kernels.formats.source_codes import minima_of

_BITS = (4, 8)
_PARTS = ("weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")


def find_compressed_tensors(files: TensorFiles, config: JsonObject) -> Found:
    """Return a checkpoint's quantised weights; `UnsupportedModelError` for an unknown packing."""
    found = find_nvfp4(files)
    if not found.weights:
        found = find_fp8(files, config)
    widths = _widths(config)
    for name, entry in files.entries.items():
        if name in found.parts:
            continue
        prefix, _, part = name.rpartition(".")
        if entry.dtype == "U8":
            raise UnsupportedModelError(
                f"{files.directory} has {name}, which belongs to a format of compressed-tensors "
                f"that Tandem does not read ({config.get('format')}); it reads packed integers of "
                "4 and 8 bits, int8, FP8 and NVFP4"
            )
        parts = [n for p in (part, *_PARTS) if (n := f"{prefix}.{p}") in files]
        if part == "weight_packed":
            found.add(_packed(files, prefix, widths, parts))
        elif part == "weight" and entry.dtype == "I8":
            found.add(_plain(files, prefix, parts))
    return found


def _widths(config: JsonObject) -> set[int]:
    """Return the widths in bits that the config gives to weights."""
    groups = config.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()]
    return {int(weight.get("num_bits", 8)) for weight in weights}


def _packed(
    files: TensorFiles, prefix: str, widths: set[int], parts: list[str]
) -> "PackedIntegers":
    rows, words = files.shape(f"{prefix}.weight_packed")
    if len(widths) == 1:
        (bits,) = widths
        cols = words * 32 // bits
    else:
        rows, cols = files.read(f"{prefix}.weight_shape").tolist()
        bits = words * 32 // cols
    if bits not in _BITS:
        raise UnsupportedModelError(
            f"{prefix} is packed in {bits} bits by compressed-tensors; Tandem reads 4 and 8"
        )
    groups = _groups(files, prefix, rows, cols)
    has_zeros = f"{prefix}.weight_zero_point" in files
    zeros = " with zero points" if has_zeros else ""
    return PackedIntegers(
        name=f"{prefix}.weight",
        shape=(rows, cols),
        formats=integer_formats(bits, cols, cols // groups, has_zeros=has_zeros),
        what=f"codes of {bits} bits in groups of {cols // groups}{zeros}",
        parts=parts,
        files=files,
        is_ordered=f"{prefix}.weight_g_idx" in files,
        bits=bits,
    )


def _groups(files: TensorFiles, prefix: str, rows: int, cols: int) -> int:
    shape = files.shape(f"{prefix}.weight_scale") if f"{prefix}.weight_scale" in files else None
    groups = 1 if shape in ((), (1,), (rows,), (1, 1)) else shape[-1] if shape else 0
    if not groups or cols % groups or shape not in ((), (1,), (1, 1), (rows,), (rows, groups)):
        raise ModelError(
            f"{prefix}.weight_scale has shape {shape}, expected {rows} rows of groups that divide "
            f"{cols} inputs; use the config.json that belongs to these weights"
        )
    return groups


def _scales(files: TensorFiles, prefix: str, rows: int) -> Tensor:
    scales = files.read(f"{prefix}.weight_scale")
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(rows, 1)
    return scales.reshape(rows, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedIntegers(FileWeight):
    """The unread weight of one linear layer, with 4- or 8-bit codes packed into int32 words."""

    bits: int

    def fields(self, fmt: WeightFormat, expert: int | None) -> FileFields | None:
        """Return views of the codes and scales in the file.

        Returns None if the inputs are reordered or `fmt` has another number of bits.
        """
        words, scales, zeros, order = self._parts()
        if fmt.bits != self.bits or order is not None:
            return None
        return FileFields(
            words, self.shape, scales, None if zeros is None else minima_of(zeros, scales)
        )

    def read(self, expert: int | None = None) -> Codes:
        """Read codes, scales, zero points and the order of the inputs."""
        words, scales, zeros, order = self._parts()
        codes = unpack_bits(words, self.bits)[:, : self.shape[1]]
        if order is not None:
            codes = codes[:, order]
        if zeros is None:
            half = 1 << (self.bits - 1)
            return Codes("int", codes.to(torch.int16) - half, scales, None, order)
        return Codes("int", codes, scales, zeros.contiguous(), order)

    def _parts(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return words, scales, zero points (or None), and the order of the inputs (or None).

        The first three have one row per output.
        """
        prefix, (rows, cols) = self.name.removesuffix(".weight"), self.shape
        words, name = self.files.read(f"{prefix}.weight_packed"), f"{prefix}.weight_zero_point"
        scales, zeros = _scales(self.files, prefix, rows), None
        order = self._input_order(prefix, cols // scales.shape[1])
        if name in self.files:
            zeros = unpack_bits(self.files.read(name).T.contiguous(), self.bits)[:, :rows].T
        return words, scales, zeros, order

    def _input_order(self, prefix: str, group_size: int) -> Tensor | None:
        if f"{prefix}.weight_g_idx" not in self.files:
            return None
        group_of_input = self.files.read(f"{prefix}.weight_g_idx")
        if (group_of_input < 0).all():  # compressed-tensors' mark for "no order"
            return None
        return input_order(group_of_input, group_size, f"{prefix}.weight_g_idx")


def _plain(files: TensorFiles, prefix: str, parts: list[str]) -> "PlainIntegers":
    rows, cols = files.shape(f"{prefix}.weight")
    groups = _groups(files, prefix, rows, cols)
    return PlainIntegers(
        name=f"{prefix}.weight",
        shape=(rows, cols),
        formats=integer_formats(8, cols, cols // groups, has_zeros=False),
        what=f"codes of 8 bits in groups of {cols // groups}",
        parts=parts,
        files=files,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainIntegers(FileWeight):
    """The unread weight of one linear layer, with int8 codes."""

    def fields(self, fmt: WeightFormat, expert: int | None) -> FileFields:
        """Return views of the codes and scales in the file."""
        codes = self.files.read(self.name).view(torch.uint8)
        return FileFields(codes, self.shape, self._scales(), flip=0x80)

    def read(self, expert: int | None = None) -> Codes:
        """Read codes and scales."""
        return Codes("int", self.files.read(self.name), self._scales())

    def _scales(self) -> Tensor:
        return _scales(self.files, self.name.removesuffix(".weight"), self.shape[0])
