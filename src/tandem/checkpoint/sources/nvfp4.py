"""NVFP4 checkpoints of compressed-tensors and ModelOpt: e2m1 codes, an e4m3 scale for 16 inputs.

The codes are (outputs, inputs / 2) uint8, two per byte, the first in the low bits; the scales are
`x.weight_scale`, (outputs, inputs / 16) float8. compressed-tensors names the codes
`x.weight_packed` and divides values by `x.weight_global_scale`; ModelOpt names the codes `x.weight`
and multiplies values by `x.weight_scale_2`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.checkpoint.json_files import JsonObject
from tandem.checkpoint.sources.codes import Codes, nibbles
from tandem.checkpoint.sources.files import TensorFiles
from tandem.checkpoint.sources.found import FileWeight, Found
from tandem.checkpoint.sources.fp8 import find_fp8
from tandem.core.errors import ModelError, UnsupportedModelError
from tandem.kernels.formats import WeightFormat, find_format
from tandem.kernels.formats.file_rows import FileFields

_GROUP = 16
_PACKED, _GLOBAL = "weight_packed", "weight_global_scale"
_PLAIN, _SECOND = "weight", "weight_scale_2"
# Scales of activations, which Tandem quantises in its own way, and of a KV cache in FP8.
_UNUSED = ("input_scale", "input_global_scale", "k_scale", "v_scale")


def find_modelopt(files: TensorFiles, config: JsonObject) -> Found:
    """Return the NVFP4 or FP8 weights of a ModelOpt checkpoint.

    Raises `UnsupportedModelError` for weights in other formats.
    """
    algorithm = str(config.get("quant_algo"))
    if algorithm == "FP8":
        return find_fp8(files, config)
    found = find_nvfp4(files)
    if not found.weights:
        raise UnsupportedModelError(
            f"{files.directory} is quantized by ModelOpt with {algorithm!r}; of ModelOpt Tandem "
            "reads NVFP4 and FP8"
        )
    return found


def find_nvfp4(files: TensorFiles) -> Found:
    """Return the NVFP4 weights of a checkpoint."""
    found = Found()
    for name in files.entries:
        prefix, _, part = name.rpartition(".")
        if part in _UNUSED:
            found.parts.add(name)
        for codes, factor in ((_PACKED, _GLOBAL), (_PLAIN, _SECOND)):
            if part == factor and f"{prefix}.{codes}" in files:
                _add(found, files, prefix, codes, factor)
    return found


def _add(found: Found, files: TensorFiles, prefix: str, codes: str, factor: str) -> None:
    rows, half = files.shape(f"{prefix}.{codes}")
    scales = f"{prefix}.weight_scale"
    expected = (rows, 2 * half // _GROUP)
    if scales not in files or files.shape(scales) != expected or 2 * half % _GROUP:
        shape = files.shape(scales) if scales in files else None
        raise ModelError(
            f"{scales} has shape {shape}, expected {expected} for {prefix}.{codes} of shape "
            f"{(rows, half)}; download the missing files again"
        )
    weight = Nvfp4Weight(
        name=f"{prefix}.weight",
        shape=(rows, 2 * half),
        formats=(find_format("nvfp4"),),
        parts=[f"{prefix}.{part}" for part in (codes, factor, "weight_scale")],
        files=files,
        is_divided=factor == _GLOBAL,
    )
    found.add(weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvfp4Weight(FileWeight):
    """The unread weight of one linear layer."""

    is_divided: bool
    """Whether the factor of the whole matrix divides values; otherwise it multiplies them."""

    def fields(self, fmt: WeightFormat, expert: int | None) -> FileFields:
        """Return views of the codes and scales in the file, and the factor of the whole matrix."""
        codes, scales, factor = self._parts()
        return FileFields(codes, self.shape, scales, factor=factor)

    def read(self, expert: int | None = None) -> Codes:
        """Read the codes, the scales and the factor of the whole matrix."""
        codes, scales, factor = self._parts()
        factors = factor.reshape(1, 1).repeat(self.shape[0], 1)
        return Codes("nvfp4", nibbles(codes), scales, super_scales=factors)

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes (two per byte), scales as bytes, and the fp32 factor of all values."""
        codes, number, scales = map(self.files.read, self.parts)
        factor = 1 / number.float() if self.is_divided else number.float().clone()
        return codes.view(torch.uint8), scales.view(torch.uint8), factor
