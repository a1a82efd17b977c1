"""FP8 checkpoints: e4m3 codes with a scale for each block of 128 x 128 (DeepSeek-V3, Qwen3-FP8).

`x.weight` is float8_e4m3fn; its scales are `x.weight_scale_inv` or `x.weight_scale`. A single scale
for the whole matrix applies to all blocks; no packed format holds a scale for each row. DeepSeek-V4
names the scales `x.scale` and stores them as E8M0 exponents; its experts' weights are e2m1 codes
with dtype int8 (`mxfp4`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.checkpoint.json_files import JsonObject
from tandem.checkpoint.sources.codes import Codes
from tandem.checkpoint.sources.files import TensorFiles
from tandem.checkpoint.sources.found import FileWeight, Found
from tandem.checkpoint.sources.mxfp4 import mxfp4_matrix
from tandem.core.errors import ModelError
from tandem.kernels.formats import WeightFormat, find_format
from tandem.kernels.formats.file_rows import FileFields

BLOCK = 128
_SCALE_NAMES = ("weight_scale_inv", "weight_scale", "scale")
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")


def find_fp8_and_e2m1(files: TensorFiles, config: JsonObject) -> Found:
    """Return a checkpoint's weights with FP8 codes and those with e2m1 codes (int8 tensors)."""
    found = find_fp8(files, config)
    for name, entry in files.entries.items():
        if entry.dtype == "I8" and name.endswith(".weight"):
            found.add(mxfp4_matrix(files, name))
    return found


def find_fp8(files: TensorFiles, config: JsonObject) -> Found:
    """Return the FP8 weights of a checkpoint."""
    found = Found()
    for name, entry in files.entries.items():
        if entry.dtype != "F8_E4M3" or not name.endswith(".weight"):
            continue
        prefix = name.removesuffix(".weight")
        scales = next((s for p in _SCALE_NAMES if (s := f"{prefix}.{p}") in files), None)
        if scales is None:
            raise ModelError(
                f"{name} has no {prefix}.{_SCALE_NAMES[0]}; download the missing files again"
            )
        found.add(_weight(files, name, scales))
        found.parts |= {f"{prefix}.input_scale", f"{prefix}.activation_scale"}  # not needed
    return found


def _weight(files: TensorFiles, name: str, scales: str) -> "Fp8Weight":
    rows, cols = files.shape(name)
    shape, dtype = files.shape(scales), files.entries[scales].dtype
    if dtype not in _SCALE_DTYPES:
        raise ModelError(
            f"{scales} is {dtype}, expected one of {', '.join(_SCALE_DTYPES)}; the checkpoint is "
            "damaged or of a form that is not read: download it again"
        )
    blocks = (-(-rows // BLOCK), -(-cols // BLOCK))
    per_matrix = all(size == 1 for size in shape)
    per_row = not per_matrix and shape in ((rows,), (rows, 1))
    if not (per_matrix or per_row or shape == blocks):
        raise ModelError(
            f"{scales} has shape {shape}, expected {blocks} for blocks of {BLOCK} x {BLOCK}, "
            f"{(rows, 1)} for rows or one number; other blocks are not read"
        )
    return Fp8Weight(
        name=name,
        shape=(rows, cols),
        formats=() if per_row and shape != blocks else (find_format("fp8"),),
        what="e4m3 codes with a scale for each row",
        parts=(name, scales),
        files=files,
        scales=scales,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight(FileWeight):
    """The unread weight of one linear layer, with e4m3 codes."""

    scales: str

    def fields(self, fmt: WeightFormat, expert: int | None) -> FileFields:
        """Return views of the codes and scales in the file."""
        codes = self.files.read(self.name).view(torch.uint8)
        return FileFields(codes, self.shape, self._block_scales(self._numbers()))

    def read(self, expert: int | None = None) -> Codes:
        """Read codes and scales."""
        codes, scales = self.files.read(self.name), self._numbers().float()
        if not self.formats:  # one group per row, as wide as the matrix
            return Codes("int", codes.float(), scales.reshape(self.shape[0], 1))
        return Codes("fp8", codes, self._block_scales(scales).contiguous())

    def _numbers(self) -> Tensor:
        """Return the scales as floating-point numbers; E8M0 exponents become fp32."""
        scales = self.files.read(self.scales)
        return scales.float() if scales.element_size() == 1 else scales

    def _block_scales(self, scales: Tensor) -> Tensor:
        """Return a scale for each block; a single scale is expanded as a view."""
        rows, cols = self.shape
        blocks = (-(-rows // BLOCK), -(-cols // BLOCK))
        return scales.reshape(1, 1).expand(blocks) if scales.numel() == 1 else scales
