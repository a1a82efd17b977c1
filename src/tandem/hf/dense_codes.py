"""Linear layers of quantised checkpoints that keep their codes: packed as they arrive.

For `dense_dtype` "auto" on the CPU. A layer that no packed format holds exactly is dequantised and
packed again, like the layers that the checkpoint has not quantised.
"""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tandem.checkpoint.sources.codes import StoredWeight
from tandem.checkpoint.sources.gguf_weight import file_blocks
from tandem.checkpoint.sources.source import Source, SourceTensor
from tandem.core.errors import ModelError
from tandem.foreign_types import PreTrainedModel
from tandem.hf.dense import PackedLinear, packable_layers, untie
from tandem.kernels.dense import CpuThreads, DenseWeight, padded_bias
from tandem.kernels.formats import PackedMatrix, WeightFormat
from tandem.kernels.formats.file_blocks import write_file_blocks
from tandem.kernels.formats.packed import write_codes


def quantised_layers(
    model: nn.Module, source: Source, targets: Mapping[str, str]
) -> dict[str, WeightFormat | None]:
    """Return the linear layers, by weight, that a source has quantised, and what holds their codes.

    None: no format does, or inputs are in an order of their own. `targets` says in which parameter
    each of the source's names ends.
    """
    by_parameter: dict[str, list[StoredWeight]] = defaultdict(list)
    for name, weight in source.weights.items():
        by_parameter[targets.get(name, "")].append(weight)
    paths = {id(module): path for path, module in model.named_modules()}
    tied = getattr(model, "all_tied_weights_keys", {})
    found: dict[str, WeightFormat | None] = {}
    for _, _, linear in packable_layers(model):
        parameter = f"{paths[id(linear)]}.weight"
        # A head that is tied to the embeddings has their codes.
        weights = by_parameter.get(tied.get(parameter, parameter), [])
        if weights:
            found[parameter] = _format_of(weights, linear)
    return found


def _format_of(weights: list[StoredWeight], linear: nn.Linear) -> WeightFormat | None:
    weight = weights[0]
    is_whole = len(weights) == 1 and tuple(weight.shape) == tuple(linear.weight.shape)
    if not is_whole or weight.is_ordered or not weight.formats:
        return None
    return weight.formats[0]


class DenseCodes:
    """Takes the codes of linear layers while a checkpoint streams in, and then puts them in."""

    def __init__(self) -> None:
        """Expect none."""
        self._formats: dict[str, WeightFormat] = {}
        self._tied: dict[str, str] = {}
        self._matrices: dict[str, PackedMatrix] = {}

    def expect(self, formats: Mapping[str, WeightFormat | None], tied: Mapping[str, str]) -> None:
        """Keep the codes of these layers, by weight, in these formats.

        `tied` says which other weight some of them share, such as the embeddings.
        """
        self._formats = {name: fmt for name, fmt in formats.items() if fmt is not None}
        self._tied = {tied[name]: name for name in self._formats if name in tied}

    def take(self, parameter: str, tensor: SourceTensor) -> Tensor:
        """Keep a weight's codes and return an empty placeholder, or return its values.

        The codes of embeddings are kept for the head that is tied to them, and their values
        returned. Raises `ModelError` for what is damaged.
        """
        if parameter in self._tied:
            self._take(self._tied[parameter], tensor)
            return tensor.values()
        return self._take(parameter, tensor)

    def _take(self, parameter: str, tensor: SourceTensor) -> Tensor:
        fmt = self._formats.get(parameter)
        if fmt is None:
            return tensor.values()
        name = tensor.weight.name
        blocks = file_blocks(tensor.weight, fmt)
        if blocks is not None and len(blocks) == 1:
            rows, cols = tensor.weight.shape
            matrix = PackedMatrix.empty(rows, cols, fmt)
            write_file_blocks(matrix.blocks, fmt, blocks[0], name=name)
            return self._keep(parameter, matrix, tensor)
        codes = tensor.weight.read()
        try:
            if codes.input_order is not None:
                return codes.values(name).to(tensor.dtype)
            coded = codes.coded(fmt, name)
        except ModelError:  # a scale that fp16 has not; damaged ones have no values either
            return codes.values(name).to(tensor.dtype)
        rows, cols = codes.codes.shape
        matrix = PackedMatrix.empty(rows, cols, fmt)
        write_codes(matrix.blocks, fmt, coded, name=name)
        return self._keep(parameter, matrix, tensor)

    def _keep(self, parameter: str, matrix: PackedMatrix, tensor: SourceTensor) -> Tensor:
        """Note a layer's packed matrix and return the placeholder of its weight."""
        self._matrices[parameter] = matrix
        return torch.empty(0, dtype=tensor.dtype, device="cpu")

    def put_in(self, model: PreTrainedModel, threads: CpuThreads) -> None:
        """Replace the layers whose codes were taken by packed ones."""
        for parameter, matrix in self._matrices.items():
            path = parameter.removesuffix(".weight")
            linear, (above, _, name) = model.get_submodule(path), path.rpartition(".")
            weight = DenseWeight(matrix, padded_bias(linear.bias, matrix.rows))
            setattr(
                model.get_submodule(above), name, PackedLinear(weight, threads, linear.weight.dtype)
            )
        if self._matrices:
            untie(model, PackedLinear)
        self._matrices = {}
