"""A quantised checkpoint in the form that Transformers' loader and the host store accept."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.checkpoint.json_files import JsonObject
from tandem.checkpoint.sources.awq import find_awq
from tandem.checkpoint.sources.compressed_tensors import find_compressed_tensors
from tandem.checkpoint.sources.files import TensorFiles
from tandem.checkpoint.sources.found import FileWeight, Found
from tandem.checkpoint.sources.fp8 import find_fp8_and_e2m1
from tandem.checkpoint.sources.gguf_weight import GgufWeight
from tandem.checkpoint.sources.gptq import find_gptq
from tandem.checkpoint.sources.mxfp4 import find_mxfp4
from tandem.checkpoint.sources.nvfp4 import find_modelopt
from tandem.core.errors import ModelError, UnsupportedModelError
from tandem.kernels.formats import WeightFormat
from tandem.kernels.formats.weight_format import ExpertFormat, expert_format

# `quant_method` of config.json -> the function that finds the weights.
READERS: dict[str, Callable[[TensorFiles, JsonObject], Found]] = {
    "gptq": find_gptq,
    "awq": find_awq,
    "compressed-tensors": find_compressed_tensors,
    "fp8": find_fp8_and_e2m1,
    "mxfp4": find_mxfp4,
    "modelopt": find_modelopt,
}


StoredWeight = FileWeight | GgufWeight
"""An unread weight of a quantised checkpoint."""


class SourceTensor:
    """Stands for an unread weight while Transformers' loader passes it on to Tandem's own code.

    The loader reads a tensor by indexing it, and then casts it; here, neither operation reads the
    weight.
    """

    def __init__(self, weight: StoredWeight, dtype: torch.dtype | None = None) -> None:
        """Stand for a weight whose values will have this dtype, by default fp32."""
        self.weight = weight
        self.dtype = dtype or torch.float32
        self.shape = torch.Size(weight.shape)

    def __getitem__(self, index: object) -> "SourceTensor":
        return self

    def to(self, device: object = None, dtype: torch.dtype | None = None) -> "SourceTensor":
        """Return the unread weight with another dtype for its values."""
        return self if dtype is None else SourceTensor(self.weight, dtype)

    def values(self) -> Tensor:
        """Read the weight and return its values."""
        weight = self.weight
        if len(weight.shape) == 2:
            return weight.read().values(weight.name).to(self.dtype)
        experts = (weight.read(expert) for expert in range(weight.shape[0]))
        return torch.stack([codes.values(weight.name) for codes in experts]).to(self.dtype)


class FormatFound(NamedTuple):
    """The packed formats that hold a module's experts."""

    format: ExpertFormat | None
    """The format of the experts; None if the checkpoint does not quantise them."""
    rounded: str
    """For a message: which weight is rounded, why, and to which format; empty if none is."""
    coded: tuple[str, ...]
    """The module's parameters whose codes the format holds exactly."""


class Source:
    """The weights of a quantised checkpoint, and its unquantised tensors."""

    def __init__(
        self,
        method: str,
        weights: Mapping[str, StoredWeight],
        plain: dict[str, object],
        *,
        plain_experts: Mapping[str, WeightFormat | None] = MappingProxyType({}),
    ) -> None:
        """Describe a checkpoint; `plain` has the unquantised tensors as Transformers loads them.

        `plain_experts` maps the experts' parameters in `plain` to the format that holds them, or to
        None if they are fp32, which no format holds.
        """
        self.method = method
        self.weights = weights
        self.plain = plain
        self.plain_experts = plain_experts

    @property
    def num_bytes(self) -> int:
        """Bytes of the quantised weights in their files."""
        return sum(weight.num_bytes for weight in self.weights.values())

    def state_dict(self) -> dict[str, object]:
        """Return all tensors under the names that they have in an unquantised checkpoint."""
        return self.plain | {name: SourceTensor(weight) for name, weight in self.weights.items()}

    def expert_format(self, targets: Mapping[str, str], module: str) -> "FormatFound":
        """Return the packed formats that hold a module's experts.

        `targets` maps checkpoint names to parameters. The result's `format` is None if these
        experts are not quantised. Raises `UnsupportedModelError` if no format holds all weights of
        a projection.
        """
        names = ("gate_up_proj", "up_proj"), ("down_proj",)
        projections = [[f"{module}.{name}" for name in of_one] for of_one in names]
        found = [self._common_format(targets, parameters) for parameters in projections]
        pairs = list(zip(projections, found, strict=True))
        coded = (p for parameters, (fmt, why) in pairs if fmt and not why for p in parameters)
        rounded = next((why for _, why in found if why), "")
        up, down = (fmt or self._plain_format(parameters) for parameters, (fmt, _) in pairs)
        if not up or not down or not self.weights:
            return FormatFound(None, rounded, ())
        return FormatFound(expert_format(up, down), rounded, tuple(coded))

    def _plain_format(self, parameters: Sequence[str]) -> WeightFormat | None:
        """Return the packed format of an unquantised projection; None if no format holds it."""
        found = (self.plain_experts.get(parameter) for parameter in parameters)
        return next((fmt for fmt in found if fmt is not None), None)

    def _common_format(
        self, targets: Mapping[str, str], parameters: Sequence[str]
    ) -> tuple[WeightFormat | None, str]:
        """Return the format for these parameters, and why they must be rounded to it.

        The reason is empty if the format holds the parameters exactly. Returns (None, "") if they
        are not quantised. Raises `UnsupportedModelError` if there is no such format.
        """
        weights = [w for name, w in self.weights.items() if targets.get(name) in parameters]
        if not weights:
            return None, ""
        for fmt in weights[0].formats:
            if all(fmt in weight.formats for weight in weights):
                return fmt, ""
        near = weights[0].near_format
        if len(weights) == 1 and near is not None:
            return near, f"{weights[0].name} ({weights[0].why_not}) to {near.name}"
        odd = next((weight for weight in weights if weight.why_not), weights[-1])
        raise UnsupportedModelError(
            f"{odd.name} has {odd.why_not or 'another format than its neighbours'}, which no "
            "packed format holds exactly; give an expert_dtype such as int8, int4 or bf16, to "
            "which its values are rounded"
        )


def open_source(files: TensorFiles, quantization: JsonObject) -> Source:
    """Return a quantised checkpoint; `UnsupportedModelError` for an unknown method."""
    method = str(quantization.get("quant_method"))
    if method not in READERS:
        raise UnsupportedModelError(
            f"{files.directory} is quantized with {method!r}, which Tandem does not read; it reads "
            f"{', '.join(READERS)} and unquantised checkpoints"
        )
    found = READERS[method](files, quantization)
    if not found.weights:
        raise ModelError(
            f"{files.directory}/config.json says that the model is quantized with {method!r}, but "
            "no tensor is; use the config.json that belongs to these weights"
        )
    names = (name for name in files.entries if name not in found.parts)
    return Source(method, found.weights, {name: files.slice_of(name) for name in names})
