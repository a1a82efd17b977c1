"""Stores experts in the host store: as codes if the layer's format holds them, else as values."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.checkpoint.mapped_files import forget
from tandem.checkpoint.sources.codes import Codes
from tandem.checkpoint.sources.source import SourceTensor, StoredWeight
from tandem.core.errors import ModelError
from tandem.experts.store.host_store import HostLayer
from tandem.experts.store.packed_layer import PackedLayer
from tandem.kernels.formats import CodedMatrix
from tandem.kernels.formats.file_rows import FileRows


def put_fused(
    layer: HostLayer, tensor_name: str, fused: Tensor | SourceTensor, *, forgets: bool = False
) -> None:
    """Store one projection or bias of all experts of a layer, `fused` (num_experts, ...).

    With `forgets`, pages of the file are dropped from memory once they have been read. Raises
    `ModelError` for weights that the layer cannot store.
    """
    if not isinstance(fused, SourceTensor):
        layer.put(tensor_name, fused)
        return
    experts = range(fused.shape[0])
    unread = [[(fused.weight, expert)] for expert in experts]
    if _put_rows(layer, tensor_name, unread, forgets=forgets):
        return
    for expert in experts:
        _put_codes(layer, tensor_name, expert, [(fused, fused.weight.read(expert))])


def put_experts(
    layer: HostLayer,
    tensor_name: str,
    columns: Sequence[list[Tensor | SourceTensor]],
    *,
    forgets: bool = False,
) -> None:
    """Store the tensor `tensor_name` of every expert, stacked from parts such as gate and up.

    Each list in `columns` has one of these parts for every expert. A part's rows are outputs, even
    if the layer stores the transpose. If experts are stored one by one, each stored part is
    replaced by an empty tensor in `columns`, so that a layer is never in memory twice. `forgets`
    and the raised `ModelError` are as in `put_fused`.
    """
    plain = [[part for part in column if isinstance(part, Tensor)] for column in columns]
    if isinstance(layer, PackedLayer) and list(map(len, plain)) == list(map(len, columns)):
        parts = list(zip(*plain, strict=True))
        layer.put_all(tensor_name, [_as_kept(layer, part) for part in parts])
        return
    unread = [
        [(part.weight, None) for part in parts if isinstance(part, SourceTensor)]
        for parts in zip(*columns, strict=True)
    ]
    are_all = all(len(parts) == len(columns) for parts in unread)
    if are_all and _put_rows(layer, tensor_name, unread, forgets=forgets):
        return
    for expert in range(len(columns[0])):
        _put_expert(layer, tensor_name, expert, [column[expert] for column in columns])
        for column in columns:
            column[expert] = torch.empty(0, device="cpu")


def _put_expert(
    layer: HostLayer, tensor_name: str, expert: int, parts: Sequence[Tensor | SourceTensor]
) -> None:
    """Store one expert's tensor, which is stacked from `parts`; raises `ModelError`."""
    sources = [part for part in parts if isinstance(part, SourceTensor)]
    if len(sources) == len(parts):
        read = [(part, part.weight.read()) for part in sources]
        _put_codes(layer, tensor_name, expert, read)
        return
    tensors = [part.values() if isinstance(part, SourceTensor) else part for part in parts]
    layer.put_expert(tensor_name, expert, _as_kept(layer, tensors))


def _as_kept(layer: HostLayer, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return an expert's parts: joined and transposed for a transposed layer, else unchanged."""
    return [torch.cat(list(parts)).T] if layer.is_transposed else parts


def _put_rows(
    layer: HostLayer,
    tensor_name: str,
    experts: Sequence[Sequence[tuple[StoredWeight, int | None]]],
    *,
    forgets: bool,
) -> bool:
    """Store all experts' rows directly from the file; return False if that is not possible.

    `experts` lists, for each expert, the weights that are stacked, each with the expert's number in
    that weight (None if the weight is one expert's). Returns False also for a damaged file: the
    caller then reads codes with torch, which reports the damage.
    """
    if not isinstance(layer, PackedLayer):
        return False
    fmt, found = layer.format_of(tensor_name), list[list[FileRows]]()
    for parts in experts:
        rows = [weight.in_file(fmt, expert) for weight, expert in parts]
        found.append([one for part in rows if part is not None for one in part])
        if any(part is None for part in rows):
            return False
    try:
        layer.put_rows(tensor_name, found)
    except ModelError:
        return False
    if forgets:
        forget(extent for parts in found for rows in parts for extent in rows.extents())
    return True


def _put_codes(
    layer: HostLayer, tensor_name: str, expert: int, parts: list[tuple[SourceTensor, Codes]]
) -> None:
    """Store an expert's parts as codes if the layer's format holds all of them, else as values."""
    if isinstance(layer, PackedLayer):
        fmt = layer.format_of(tensor_name)
        if all(fmt in source.weight.formats for source, _ in parts):
            coded = [codes.coded(fmt, source.weight.name) for source, codes in parts]
            layer.put_codes(tensor_name, expert, CodedMatrix.stacked(coded), _common_order(parts))
            return
    values = [codes.values(source.weight.name).to(source.dtype) for source, codes in parts]
    if layer.is_transposed:  # codes have one row per output
        values = [torch.cat(values).T]
    layer.put_expert(tensor_name, expert, values)


def _common_order(parts: list[tuple[SourceTensor, Codes]]) -> Tensor | None:
    """Return the input order that all parts of an expert have; `ModelError` if they differ.

    None means that all parts have the inputs in their usual order.
    """
    first, *others = (codes.input_order for _, codes in parts)
    for other in others:
        is_same = other is first or (
            other is not None and first is not None and torch.equal(other, first)
        )
        if not is_same:
            names = " and ".join(source.weight.name for source, _ in parts)
            raise ModelError(
                f"{names} order their inputs differently (activation order), expected one order "
                "for both; give an expert_dtype such as int8, to which they are rounded again"
            )
    return first
