"""Unread weights of a GGUF file, as blocks or as plain numbers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from types import EllipsisType

import numpy as np
import torch
from torch import Tensor

from tandem.checkpoint.sources.codes import Codes, stored_codes
from tandem.checkpoint.sources.gguf_blocks import FORMATS, code_table, common_format
from tandem.checkpoint.sources.gguf_header import GgufTensor
from tandem.kernels.formats import CodedMatrix, WeightFormat, find_format
from tandem.kernels.formats.blocks import SCALE_DTYPES, MatrixBlocks
from tandem.kernels.formats.file_rows import FileBlocks, Placing, write_file_rows

Index = int | slice | EllipsisType | tuple[slice, ...]
_EXPERTS = "_exps."  # in the names of tensors that hold all experts of a layer
PLAIN_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufWeight:
    """A weight made of one tensor, or of several stacked along the rows (gate, then up)."""

    name: str
    tensors: tuple[GgufTensor, ...] = field(repr=False)
    is_interleaved: bool = False
    """Whether the rows of several tensors are interleaved."""
    is_transposed: bool = False
    """Whether unquantised experts' matrices are transposed."""
    row_order: Tensor | None = field(default=None, repr=False)
    factors: tuple[GgufTensor | None, ...] = field(default=(), repr=False)
    """For each tensor: the NVFP4 factor (one, or one per expert), or None. Empty: no factors."""
    column_order: Tensor | None = field(default=None, repr=False)

    @property
    def is_ordered(self) -> bool:
        """Whether its columns are in another order than the layer's inputs."""
        return self.column_order is not None

    @property
    def is_plain(self) -> bool:
        """Whether none of its tensors is in blocks."""
        return all(tensor.tensor_type.name in PLAIN_DTYPES for tensor in self.tensors)

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, cols), or (num_experts, rows, cols); rows are the outputs."""
        *experts, rows, cols = (int(size) for size in reversed(self.tensors[0].shape))
        rows += sum(int(tensor.shape[1]) for tensor in self.tensors[1:])
        return (*experts, rows, cols)

    @property
    def formats(self) -> Sequence[WeightFormat]:
        """The formats that hold these blocks exactly: one or none."""
        found = common_format({tensor.tensor_type.name for tensor in self.tensors})
        if found is None or (self.factors and found.name != "nvfp4"):
            return ()
        return (found,)

    @property
    def why_not(self) -> str:
        """The types of its blocks, if no format holds them; empty otherwise."""
        kinds = sorted({tensor.tensor_type.name for tensor in self.tensors})
        return "" if self.formats else f"GGUF blocks {' and '.join(kinds)}"

    @property
    def near_format(self) -> WeightFormat | None:
        """The format to round to if each tensor has a packed format, but no format holds them all.

        None in all other cases. Rounding errors are at most half a percent of a group's largest
        value.
        """
        are_held = all(tensor.tensor_type.name in FORMATS for tensor in self.tensors)
        return find_format("int8-g32") if are_held and not self.formats else None

    @property
    def num_bytes(self) -> int:
        """The bytes that the weight's tensors take in the file."""
        return sum(int(tensor.n_bytes) for tensor in self.tensors)

    def in_file(self, fmt: WeightFormat, expert: int | None = None) -> list[FileBlocks] | None:
        """Return the blocks of the matrix, or of one expert's matrix; one item per tensor.

        Returns None if `fmt` cannot store the blocks unchanged; `read` must then be used.
        """
        is_joined = self.row_order is not None and len(self.tensors) > 1
        if fmt not in self.formats or self.is_ordered or is_joined:
            return None
        return [replace(part, order=self.row_order) for part in self._blocks(fmt, expert)]

    def read(self, expert: int | None = None) -> Codes:
        """Read the matrix, or one expert's, as codes; as values if no format holds the codes."""
        fmt = next(iter(self.formats), None)
        if fmt is None:
            values = self.in_order([_dequantised(tensor, expert) for tensor in self.tensors])
            return Codes("int", values, torch.ones(len(values), 1, device="cpu"))
        parts = [_placed(blocks, fmt, self.name) for blocks in self._blocks(fmt, expert)]
        rows = torch.arange(sum(len(part.codes) for part in parts), device="cpu")
        rows = self.in_order(list(rows.split([len(part.codes) for part in parts])))
        coded = CodedMatrix.stacked(parts).rows(rows)
        return stored_codes(coded, fmt, input_order=self.column_order)

    def _blocks(self, fmt: WeightFormat, expert: int | None) -> Iterator[FileBlocks]:
        for tensor, factor in zip_longest(self.tensors, self.factors):
            rows = (tensor.data if expert is None else tensor.data[expert]).view(np.uint8)
            number = None if factor is None else _factor(factor, expert)
            table = code_table(tensor.tensor_type.name, fmt)
            yield FileBlocks(rows, tensor.tensor_type.value, table=table, factor=number)

    def in_order(self, parts: list[Tensor], axis: int = 0) -> Tensor:
        """Return the rows of all tensors, given in `parts`, joined in Transformers' order.

        `axis` is the dimension of the rows.
        """
        if len(parts) > 1 and self.is_interleaved:
            return torch.stack(parts, dim=axis + 1).flatten(axis, axis + 1)
        joined = torch.cat(parts, dim=axis) if len(parts) > 1 else parts[0]
        return joined if self.row_order is None else joined[self.row_order]


class PlainTensor:
    """A weight that is unquantised or computed, and is read when Transformers indexes it."""

    def __init__(
        self,
        weight: GgufWeight,
        shape: torch.Size,
        made: Callable[[list[Tensor]], Tensor] | None = None,
    ) -> None:
        """Describe a weight of this shape; `made` computes it from the values of its tensors.

        If `made` is None, the tensors' rows are joined.
        """
        self.weight = weight
        self.shape = shape
        self._made = made

    @property
    def are_experts(self) -> bool:
        """Whether it is a projection of a layer's experts."""
        return self.weight.tensors[0].name.endswith(f"{_EXPERTS}weight")

    @property
    def expert_format(self) -> WeightFormat | None:
        """The packed format of the tensors' dtype, bf16 or fp16; None for fp32 or mixed dtypes."""
        kinds = {tensor.tensor_type.name for tensor in self.weight.tensors}
        name = {"BF16": "bf16", "F16": "fp16"}.get(kinds.pop()) if len(kinds) == 1 else None
        return None if name is None else find_format(name)

    def __getitem__(self, index: Index) -> Tensor:
        weight = self.weight
        parts = [tensor_values(*pair) for pair in zip_longest(weight.tensors, weight.factors)]
        if self._made is not None:
            return self._chosen(self._made(parts), index)
        axis = 1 if len(parts) > 1 and _EXPERTS in weight.tensors[0].name else 0
        values = weight.in_order(parts, axis)
        if weight.column_order is not None:
            values = values[..., weight.column_order.argsort()]
        is_turned = values.dim() == 3 and weight.is_transposed
        return self._chosen(values.transpose(1, 2) if is_turned else values, index)

    def _chosen(self, values: Tensor, index: Index) -> Tensor:
        chosen: Tensor = values.reshape(self.shape)[index]
        return chosen


def _placed(blocks: FileBlocks, fmt: WeightFormat, name: str) -> CodedMatrix:
    """Return the codes of GGUF blocks as matrix rows in packed format `fmt`.

    The codes have memory of their own: views of shared memory would keep all of it allocated.
    """
    rows, cols, kind = blocks.num_rows, blocks.num_cols, fmt.encoding.scale
    data = torch.empty(fmt.data_bytes(rows, cols), dtype=torch.uint8, device="cpu")
    scales = None
    if kind is not None:
        scales = torch.empty(fmt.scale_bytes(rows, cols), dtype=torch.uint8, device="cpu")
        scales = scales.view(SCALE_DTYPES[kind])
    packed = MatrixBlocks.over(fmt, rows, cols, data, scales)
    write_file_rows([Placing(packed, fmt, blocks, name)])
    return packed.read(fmt).rows(slice(rows))


def _factor(factor: GgufTensor, expert: int | None) -> Tensor:
    return torch.tensor(float(np.array(factor.data)[expert or 0]), device="cpu")


def tensor_values(tensor: GgufTensor, factor: GgufTensor | None = None) -> Tensor:
    """Return a tensor's values; blocks are dequantised and multiplied by `factor`, if given.

    `factor` must have a single number. A tensor without blocks ignores it.
    """
    if tensor.tensor_type.name in PLAIN_DTYPES:
        return _plain_values(tensor)
    values = _dequantised(tensor, None)
    return values if factor is None else values * float(np.array(factor.data).item())


def _plain_values(tensor: GgufTensor) -> Tensor:
    data = torch.from_numpy(np.array(tensor.data))  # a copy, because the file is mapped read-only
    dtype = PLAIN_DTYPES[tensor.tensor_type.name]
    values = data if data.dtype == dtype else data.view(dtype)
    return values.view([int(size) for size in reversed(tensor.shape)])


def _dequantised(tensor: GgufTensor, expert: int | None) -> Tensor:
    """Return the fp32 values of blocks, or of one expert's, as the gguf package decodes them."""
    from gguf import dequantize

    rows = tensor.data if expert is None else tensor.data[expert]
    return torch.from_numpy(np.ascontiguousarray(dequantize(rows, tensor.tensor_type)))
