"""Weights of a GGUF file, unread: in blocks, in plain numbers, or in two halves."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.checkpoint.sources.codes import Codes, StoredWeight
from tandem.checkpoint.sources.gguf_blocks import FORMATS, read_blocks
from tandem.checkpoint.sources.gguf_header import GgufTensor
from tandem.kernels.formats import WeightFormat, find_format
from tandem.kernels.formats.file_blocks import FileBlocks, has_file_blocks

Index = int | slice | EllipsisType | tuple[slice, ...]
_BY_ROW = ("codes", "scales", "minima", "super_scales", "super_minima")  # of `Codes`
PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufWeight:
    """A weight of one tensor, or of several whose rows follow each other (gate, then up)."""

    name: str
    tensors: tuple[GgufTensor, ...] = field(repr=False)
    is_interleaved: bool = False
    """Rows of several tensors are interleaved instead; matrices of plain numbers are transposed."""
    row_order: Tensor | None = field(default=None, repr=False)
    factors: tuple[GgufTensor | None, ...] = field(default=(), repr=False)
    """Of each tensor, one number or one for each expert, beside NVFP4; without entries: none."""
    is_ordered: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in Transformers' order."""
        *leading, cols = (int(size) for size in reversed(self.tensors[0].shape))
        if len(self.tensors) > 1:
            leading[-1] *= len(self.tensors)
        return (*leading, cols)

    @property
    def formats(self) -> Sequence[WeightFormat]:
        """The one format that holds these blocks exactly, if all parts have the same."""
        kinds = {tensor.tensor_type.name for tensor in self.tensors}
        name = FORMATS.get(kinds.pop()) if len(kinds) == 1 else None
        if self.factors and name != "nvfp4":
            return ()
        return () if name is None else (find_format(name),)

    @property
    def why_not(self) -> str:
        """What blocks these are, where no format holds them."""
        kinds = sorted({tensor.tensor_type.name for tensor in self.tensors})
        return "" if self.formats else f"GGUF blocks {' and '.join(kinds)}"

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return sum(int(tensor.n_bytes) for tensor in self.tensors)

    def read(self, expert: int | None = None) -> Codes:
        """Read the matrix, or one expert's, as codes where a format holds them, else as values."""
        keep = bool(self.formats)
        parts = [
            read_blocks(_rows_of(tensor, expert), tensor.tensor_type, keep=keep)
            for tensor in self.tensors
        ]
        parts = [_times(part, factor, expert) for part, factor in zip_longest(parts, self.factors)]

        def joined(name: str) -> Any:
            found = [getattr(part, name) for part in parts]
            return None if found[0] is None else self.in_order(found)

        return Codes(parts[0].kind, **{name: joined(name) for name in _BY_ROW})

    def in_order(self, parts: list[Tensor], axis: int = 0) -> Tensor:
        """Join what each tensor has for its rows, along `axis`, in Transformers' order."""
        if len(parts) > 1:
            if self.is_interleaved:
                return torch.stack(parts, dim=axis + 1).flatten(axis, axis + 1)
            return torch.cat(parts, dim=axis)
        return parts[0] if self.row_order is None else parts[0][self.row_order]


def file_blocks(
    weight: StoredWeight, fmt: WeightFormat, expert: int | None = None
) -> list[FileBlocks] | None:
    """Return a weight's (or expert's) blocks, a part for each tensor, where they lie in the file.

    None where a format does not take them as they are; `read` returns their codes then.
    """
    if not isinstance(weight, GgufWeight) or fmt not in weight.formats or not has_file_blocks(fmt):
        return None
    return [FileBlocks(_mapped_rows(tensor, expert), weight.row_order) for tensor in weight.tensors]


class PlainTensor:
    """Numbers that are in no blocks, read when Transformers' loader indexes them."""

    def __init__(self, weight: GgufWeight, shape: torch.Size) -> None:
        """Stand for a weight, to be read in `shape`."""
        self.weight = weight
        self.shape = shape

    def __getitem__(self, index: Index) -> Tensor:
        parts = [_plain_values(tensor) for tensor in self.weight.tensors]
        axis = 1 if len(parts) > 1 else 0  # after the experts'
        values = self.weight.in_order(parts, axis)
        is_turned = values.dim() == 3 and self.weight.is_interleaved
        values = values.transpose(1, 2) if is_turned else values.reshape(self.shape)
        chosen: Tensor = values[index]
        return chosen


class HalvedLatent:
    """What makes keys and values from latents, stored as two tensors, the one for keys turned."""

    def __init__(self, keys: GgufTensor, values: GgufTensor) -> None:
        """Join (heads, latents, width of keys) and (heads, width of values, latents)."""
        self._keys, self._values = keys, values

    def __getitem__(self, index: Index) -> Tensor:
        keys, values = (_dequantised(tensor) for tensor in (self._keys, self._values))
        joined = torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)
        chosen: Tensor = joined[index]
        return chosen


def _times(codes: Codes, factor: GgufTensor | None, expert: int | None) -> Codes:
    """Return the codes of a matrix that is to be multiplied with a number."""
    if factor is None:
        return codes
    number = float(np.array(factor.data)[expert or 0])
    if codes.super_scales is None:
        return dataclasses.replace(codes, scales=codes.scales * number)
    return dataclasses.replace(codes, super_scales=codes.super_scales * number)


def _dequantised(tensor: GgufTensor) -> Tensor:
    if tensor.tensor_type.name in PLAIN_DTYPES:
        return _plain_values(tensor)
    from gguf import dequantize

    return torch.from_numpy(np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type)))


def _plain_values(tensor: GgufTensor) -> Tensor:
    data = torch.from_numpy(np.array(tensor.data))  # a copy: the file is mapped for reading only
    dtype = PLAIN_DTYPES[tensor.tensor_type.name]
    values = data if data.dtype == dtype else data.view(dtype)
    return values.view([int(size) for size in reversed(tensor.shape)])


def _mapped_rows(tensor: GgufTensor, expert: int | None) -> npt.NDArray[np.uint8]:
    return (tensor.data if expert is None else tensor.data[expert]).view(np.uint8)


def _rows_of(tensor: GgufTensor, expert: int | None) -> npt.NDArray[np.generic]:
    return np.array(tensor.data if expert is None else tensor.data[expert])
