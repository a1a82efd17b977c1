"""Keeps the codes of a quantised checkpoint's linear layers, and packs them as they are read.

Tandem does this for `dense_dtype` "auto", on the CPU and on a GPU with Triton. A layer whose
codes no packed format holds exactly is dequantised and packed again, like layers that the
checkpoint has not quantised.
"""

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor, nn

from tandem.checkpoint.sources.source import Source, SourceTensor, StoredWeight
from tandem.core.errors import ModelError
from tandem.devices.cuda.linear import DeviceLinear
from tandem.foreign_types import PreTrainedModel
from tandem.hf.dense import Place, packable_layers, tied_weights, untie
from tandem.hf.packed_layers import PackedEmbedding, PackedLinear, is_packable_embedding
from tandem.kernels.dense import CpuThreads, DenseWeight, padded_bias
from tandem.kernels.formats import PackedMatrix, WeightFormat
from tandem.kernels.formats.file_rows import Placing, write_file_rows
from tandem.kernels.formats.packed import write_codes
from tandem.kernels.grouped import cut_like


def quantised_layers(
    model: PreTrainedModel, source: Source, targets: Mapping[str, str], *, are_apart: bool
) -> dict[str, WeightFormat | None]:
    """Return, by weight, the format that holds a quantised linear layer's codes; None: no format.

    `targets` maps the source's names to parameters. Embeddings are included, too. `are_apart` says
    that embeddings stay on the host and layers are on a GPU; then no embeddings but the input
    embeddings are included.
    """
    by_parameter: dict[str, list[StoredWeight]] = defaultdict(list)
    for name, weight in source.weights.items():
        by_parameter[targets.get(name, "")].append(weight)
    tied = tied_weights(model)
    found: dict[str, WeightFormat | None] = {}
    for path, _, _, linear in packable_layers(model):
        parameter = f"{path}.weight"
        # A tied head has the codes of the embeddings.
        weights = by_parameter.get(tied.get(parameter, parameter), [])
        if weights:
            found[parameter] = _format_of(weights, linear.weight)
    embeddings = _embeddings(model, by_parameter, found, tied)
    if are_apart:
        read = next(path for path, m in model.named_modules() if m is model.get_input_embeddings())
        embeddings = {name: fmt for name, fmt in embeddings.items() if name == f"{read}.weight"}
    return found | embeddings


def _embeddings(
    model: PreTrainedModel,
    by_parameter: Mapping[str, list[StoredWeight]],
    heads: Mapping[str, WeightFormat | None],
    tied: Mapping[str, str],
) -> dict[str, WeightFormat | None]:
    """Return, by weight, the formats of embeddings whose rows can be read from their codes.

    Embeddings tied to a head are included only if the head keeps its codes too.
    """
    expanded = {tied[name] for name in tied if heads.get(name) is None}
    found: dict[str, WeightFormat | None] = {}
    for path, module in model.named_modules():
        weights = by_parameter.get(f"{path}.weight", [])
        if weights and is_packable_embedding(module) and f"{path}.weight" not in expanded:
            fmt = _format_of(weights, module.get_parameter("weight"))
            found |= {} if fmt is None else {f"{path}.weight": fmt}
    return found


def _format_of(weights: list[StoredWeight], parameter: Tensor) -> WeightFormat | None:
    weight = weights[0]
    is_whole = len(weights) == 1 and tuple(weight.shape) == tuple(parameter.shape)
    return weight.formats[0] if is_whole and weight.formats else None


class DenseCodes:
    """Collects codes of layers and embeddings while a checkpoint is read, then replaces both."""

    def __init__(self) -> None:
        """Start without weights whose codes are kept; `expect` names them."""
        self._formats: dict[str, WeightFormat] = {}
        self._tied: dict[str, str] = {}
        self._matrices: dict[str, PackedMatrix] = {}
        self._orders: dict[str, Tensor] = {}
        """The input order of each weight whose columns the checkpoint reorders."""

    def expect(self, formats: Mapping[str, WeightFormat | None], tied: Mapping[str, str]) -> None:
        """Set, by weight, the format in which `take` keeps codes; None: `take` returns values.

        `tied` maps a weight to the weight that it shares, such as a head's to the embeddings'.
        """
        self._formats = {name: fmt for name, fmt in formats.items() if fmt is not None}
        self._tied = {tied[name]: name for name in self._formats if name in tied}

    def take(self, parameter: str, tensor: SourceTensor) -> Tensor:
        """Keep a weight's codes and return an empty placeholder, or return the weight's values.

        A head tied to embeddings uses their codes; if rows of the embeddings are also read from
        codes, the codes are in memory only once. Raises `ModelError` for damaged codes.
        """
        head = self._tied.get(parameter)
        if head is None:
            return self._take(parameter, tensor)
        self._take(head, tensor)
        if head not in self._matrices or parameter not in self._formats:
            return tensor.values()
        return self._keep(parameter, self._matrices[head], tensor)

    def _take(self, parameter: str, tensor: SourceTensor) -> Tensor:
        fmt = self._formats.get(parameter)
        if fmt is None:
            return tensor.values()
        name = tensor.weight.name
        found = tensor.weight.in_file(fmt)
        if found is not None and len(found) == 1:
            rows, cols = tensor.weight.shape
            matrix = PackedMatrix.empty(rows, cols, fmt)
            # If this fails, the reference code below reports why, or reads values.
            with suppress(ModelError):
                write_file_rows([Placing(matrix.blocks, fmt, found[0], name)])
                return self._keep(parameter, matrix, tensor)
        codes = tensor.weight.read()
        try:
            coded = codes.coded(fmt, name)
        # A scale that fp16 cannot hold; if codes are damaged, reading their values raises too.
        except ModelError:
            return codes.values(name).to(tensor.dtype)
        rows, cols = codes.codes.shape
        matrix = PackedMatrix.empty(rows, cols, fmt)
        write_codes(matrix.blocks, fmt, coded, name=name)
        if codes.input_order is not None:
            self._orders[parameter] = codes.input_order
        return self._keep(parameter, matrix, tensor)

    def _keep(self, parameter: str, matrix: PackedMatrix, tensor: SourceTensor) -> Tensor:
        """Record a layer's packed matrix and return the placeholder of its weight."""
        self._matrices[parameter] = matrix
        return torch.empty(0, dtype=tensor.dtype, device="cpu")

    def put_in(self, model: PreTrainedModel, threads: CpuThreads, place: Place) -> None:
        """Replace the layers and embeddings whose codes were kept by packed modules.

        `place` builds the linear layers. Embeddings stay on the host, where `threads` read them.
        """
        for parameter, matrix in self._matrices.items():
            path = parameter.removesuffix(".weight")
            module, (above, _, name) = model.get_submodule(path), path.rpartition(".")
            packed: nn.Module
            if isinstance(module, nn.Embedding):
                packed = PackedEmbedding(DenseWeight(matrix, None), threads, module)
            else:
                weight = DenseWeight(matrix, padded_bias(module.bias, matrix.rows))
                order = self._orders.get(parameter)
                packed = cut_like(module, place(weight, module.weight.dtype, order))
            setattr(model.get_submodule(above), name, packed)
        if self._matrices:
            untie(model, PackedLinear, DeviceLinear)
        self._matrices, self._orders = {}, {}
