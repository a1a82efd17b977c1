"""Packed linear layers in packed checkpoints: one tensor of bytes for each, as the kernels read it.

Its name is none of Transformers' own, so that nothing but Tandem takes it for a weight.
"""

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tandem.hf.config import DEFAULT_DENSE_FORMAT
from tandem.hf.dense import PackedLinear, packable_layers, packed_layers, untie
from tandem.kernels.dense import CpuThreads, DenseWeight, pack_dense
from tandem.kernels.formats.packed import PackedMatrix
from tandem.kernels.formats.weight_format import WeightFormat, find_format

TENSOR_NAME = "tandem_dense"


class StoredLinear(nn.Module):
    """Stands in a model for a packed linear layer while the checkpoint is read."""

    def __init__(self, linear: nn.Linear, fmt: WeightFormat) -> None:
        """Expect the layer's bytes; `linear` is the one that the model was built with."""
        super().__init__()
        self.shape = (linear.out_features, linear.in_features)
        self.format = fmt
        self.has_bias = linear.bias is not None
        self.dtype = linear.weight.dtype
        size = fmt.data_bytes(*self.shape) + fmt.scale_bytes(*self.shape)
        if self.has_bias:
            size += fmt.padded_rows(linear.out_features) * torch.float32.itemsize
        place = torch.empty(size, dtype=torch.uint8, device=linear.weight.device)
        setattr(self, TENSOR_NAME, nn.Parameter(place, requires_grad=False))

    def packed(self, threads: CpuThreads) -> PackedLinear:
        """Return the layer, with memory of its own, once the bytes are there."""
        stored = self.get_parameter(TENSOR_NAME)
        matrix = PackedMatrix.empty(*self.shape, self.format)
        bias = (
            torch.empty(self.format.padded_rows(self.shape[0]), device="cpu")
            if self.has_bias
            else None
        )
        parts = [part.view(torch.uint8) for part in _parts((matrix, bias))]
        for part, piece in zip(parts, stored.split([len(part) for part in parts]), strict=True):
            part.copy_(piece)
        return PackedLinear(DenseWeight(matrix, bias), threads, self.dtype)


def expect_stored_layers(
    model: nn.Module, fmt: WeightFormat, others: Mapping[str, str] | None = None
) -> None:
    """Put a `StoredLinear` where each layer that `pack_dense_layers` would pack is.

    `others` names the formats of those, by path, that are not packed in `fmt`.
    """
    formats = {path: find_format(name) for path, name in (others or {}).items()}
    paths = {id(module): path for path, module in model.named_modules()}
    for parent, name, linear in list(packable_layers(model)):
        setattr(parent, name, StoredLinear(linear, formats.get(paths[id(linear)], fmt)))
    untie(model, StoredLinear)


def take_stored_layers(model: nn.Module, threads: CpuThreads) -> None:
    """Replace every `StoredLinear`, whose bytes have been read, by its packed layer."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, StoredLinear):
                setattr(parent, name, child.packed(threads))


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of all packed layers for a file."""
    return {
        f"{path}.{TENSOR_NAME}": torch.cat(
            [part.view(torch.uint8) for part in _parts((stored.matrix, stored.bias))]
        )
        for path, layer in packed_layers(model)
        if (stored := _stored(layer))
    }


def _stored(layer: PackedLinear) -> DenseWeight:
    """Return a layer as files have it: packed again if its inputs are in another order."""
    if layer.input_order is None:
        return layer.packed
    return pack_dense(layer.values(), layer.bias, _stored_format(layer))


def _stored_format(layer: PackedLinear) -> WeightFormat:
    is_ordered = layer.input_order is not None
    return find_format(DEFAULT_DENSE_FORMAT) if is_ordered else layer.packed.matrix.format


def dense_formats_of(model: nn.Module) -> tuple[str, dict[str, str]]:
    """Name the format of most of a model's packed layers, and those of the others by path.

    The first is "none" if no layer is packed.
    """
    names = {path: _stored_format(layer).name for path, layer in packed_layers(model)}
    if not names:
        return "none", {}
    ((most, _),) = Counter(names.values()).most_common(1)
    return most, {path: name for path, name in names.items() if name != most}


def _parts(layer: tuple[PackedMatrix, Tensor | None]) -> list[Tensor]:
    """Return a layer's tensors in the order of the file."""
    matrix, bias = layer
    return [part for part in (matrix.data, matrix.scales, bias) if part is not None]
