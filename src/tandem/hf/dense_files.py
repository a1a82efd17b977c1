"""Stores each packed linear layer or embedding in packed checkpoints as one tensor of bytes.

The bytes are in the kernels' layout. Transformers does not know the tensors' names, so only Tandem
reads them as weights.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from tandem.devices.cuda.linear import DeviceLinear
from tandem.hf.config import DEFAULT_DENSE_FORMAT, parse_dense_dtype
from tandem.hf.dense import Place, format_of, packable_layers, untie
from tandem.hf.packed_layers import PackedEmbedding, PackedLinear
from tandem.kernels.dense import CpuThreads, DenseWeight, pack_dense
from tandem.kernels.formats.packed import PackedMatrix
from tandem.kernels.formats.weight_format import WeightFormat, find_format
from tandem.kernels.grouped import cut_like, num_groups_of

TENSOR_NAME = "tandem_dense"


class StoredLinear(nn.Module):
    """A placeholder for a packed linear layer or embedding while the checkpoint is read."""

    def __init__(self, linear: nn.Linear | nn.Embedding, fmt: WeightFormat) -> None:
        """Add a parameter for the packed bytes of `linear`, the layer to be replaced."""
        super().__init__()
        rows, cols = linear.weight.shape
        self.shape = (rows, cols)
        self.format = fmt
        self.has_bias = "bias" in dict(linear.named_parameters(recurse=False))
        self.n_groups = num_groups_of(linear) if isinstance(linear, nn.Linear) else 1
        # In a tuple, because loading would read a submodule's weights.
        self._embeddings = (linear,) if isinstance(linear, nn.Embedding) else ()
        self.dtype = linear.weight.dtype
        size = fmt.matrix_bytes(*self.shape)
        if self.has_bias:
            size += fmt.padded_rows(rows) * torch.float32.itemsize
        place = torch.empty(size, dtype=torch.uint8, device=linear.weight.device)
        setattr(self, TENSOR_NAME, nn.Parameter(place, requires_grad=False))

    def packed(self, place: Place, threads: CpuThreads) -> nn.Module:
        """Return the packed layer, with its own memory; the bytes must have been read.

        `place` builds linear layers. Embeddings stay on the host, where `threads` read their rows.
        """
        stored = self.get_parameter(TENSOR_NAME)
        matrix = PackedMatrix.empty(*self.shape, self.format)
        bias = (
            torch.empty(self.format.padded_rows(self.shape[0]), device="cpu")
            if self.has_bias
            else None
        )
        parts = [part.view(torch.uint8) for part in _parts(matrix, bias)]
        for part, piece in zip(parts, stored.split([len(part) for part in parts]), strict=True):
            part.copy_(piece)
        weight = DenseWeight(matrix, bias)
        for embeddings in self._embeddings:
            return PackedEmbedding(weight, threads, embeddings)
        return cut_like(self, place(weight, self.dtype, None))


def expect_stored_layers(
    model: nn.Module, fmt: WeightFormat, others: Mapping[str, str], tensors: Collection[str]
) -> None:
    """Put a `StoredLinear` in place of each layer that the files hold in packed form.

    `tensors` are the names of the files' tensors. `others` has, by path, the formats of layers that
    are not packed in `fmt`. If `tensors` is empty, the layers are those that `pack_dense_layers`
    packs now, although another version may have packed different layers.
    """
    end = f".{TENSOR_NAME}"
    held = {name.removesuffix(end) for name in tensors if name.endswith(end)}
    formats = {path: parse_dense_dtype(name) for path, name in others.items()}
    if not tensors:
        paths = {path for path, *_ in packable_layers(model)} | set(formats)
        held = {path for path in paths if formats.get(path, fmt) is not None}
    for path, linear in list(model.named_modules()):
        if path in held and isinstance(linear, nn.Linear | nn.Embedding):
            model.set_submodule(path, StoredLinear(linear, formats.get(path) or fmt))
    untie(model, StoredLinear)


def take_stored_layers(model: nn.Module, place: Place, threads: CpuThreads) -> None:
    """Replace every `StoredLinear` by its packed layer; the bytes must have been read."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, StoredLinear):
                setattr(parent, name, child.packed(place, threads))


def stored_tensors(model: nn.Module) -> dict[str, list[Tensor]]:
    """Return, by name in a file, the bytes of each packed layer as a list of tensors to join."""
    return {
        f"{path}.{TENSOR_NAME}": [
            part.view(torch.uint8) for part in _parts(stored.matrix, stored.bias)
        ]
        for path, layer in _packed_anywhere(model)
        if (stored := _stored(layer))
    }


_AnyPacked = PackedLinear | PackedEmbedding | DeviceLinear


def _stored(layer: _AnyPacked) -> DenseWeight:
    """Return a layer's weight as files store it, with columns in the order of the inputs.

    A layer with an input order is packed again for this, in `DEFAULT_DENSE_FORMAT`.
    """
    if isinstance(layer, PackedEmbedding):
        return layer.packed
    weight = layer.on_host() if isinstance(layer, DeviceLinear) else layer.packed
    if layer.input_order is None:
        return weight
    bias = None if weight.bias is None else weight.bias[: weight.out_features]
    in_order = weight.values()[:, layer.input_order.cpu().argsort()]
    return pack_dense(in_order, bias, _stored_format(layer))


def _stored_format(layer: _AnyPacked) -> WeightFormat:
    if isinstance(layer, PackedEmbedding):
        return layer.packed.matrix.format
    if layer.input_order is not None:
        return find_format(DEFAULT_DENSE_FORMAT)
    return format_of(layer)


def _packed_anywhere(model: nn.Module) -> Iterator[tuple[str, _AnyPacked]]:
    """Yield (path, layer) of the packed linear layers and embeddings, on the CPU or a GPU."""
    kinds = (PackedLinear, PackedEmbedding, DeviceLinear)
    return ((path, m) for path, m in model.named_modules() if isinstance(m, kinds))


def packed_formats(model: nn.Module) -> dict[str, str]:
    """Return the formats of a model's packed layers and embeddings by path, as stored in files."""
    return {path: _stored_format(layer).name for path, layer in _packed_anywhere(model)}


def dense_formats_of(model: nn.Module) -> tuple[str, dict[str, str]]:
    """Return the most frequent format of a model's packed layers, and by path the other formats.

    A layer that is not packed has the format "none". If no layer is packed, the first result is
    "none" and the second is empty.
    """
    names = packed_formats(model)
    if not names:
        return "none", {}
    ((most, _),) = Counter(names.values()).most_common(1)
    names |= dict.fromkeys((path for path, *_ in packable_layers(model)), "none")
    return most, {path: name for path, name in names.items() if name != most}


def _parts(matrix: PackedMatrix, bias: Tensor | None) -> list[Tensor]:
    """Return a packed layer's data, scales and bias in the file's order, without missing ones."""
    return [part for part in (matrix.data, matrix.scales, bias) if part is not None]
