"""MXFP4: e2m1 codes, two per byte, first in the low bits, with an E8M0 exponent for 32 inputs.

gpt-oss has the experts of a layer in `x_blocks` (num_experts, outputs, groups, 16) and `x_scales`
(num_experts, outputs, groups). DeepSeek-V4 stores each matrix separately, in FP8 checkpoints:
`x.weight` (outputs, inputs / 2) int8 and `x.scale` (outputs, groups).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.checkpoint.json_files import JsonObject
from tandem.checkpoint.sources.codes import Codes, nibbles
from tandem.checkpoint.sources.files import TensorFiles
from tandem.checkpoint.sources.found import FileWeight, Found
from tandem.core.errors import ModelError
from tandem.kernels.formats import WeightFormat, find_format
from tandem.kernels.formats.file_rows import FileFields

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32  # inputs


def find_mxfp4(files: TensorFiles, config: JsonObject) -> Found:
    """Return the weights of an MXFP4 checkpoint."""
    found = Found()
    for blocks in files.entries:
        if not blocks.endswith(_BLOCKS):
            continue
        name = blocks.removesuffix(_BLOCKS)
        scales = name + _SCALES
        if scales not in files or files.shape(scales) != files.shape(blocks)[:-1]:
            raise ModelError(
                f"{blocks} has shape {files.shape(blocks)} and no {scales} of shape "
                f"{files.shape(blocks)[:-1]}; download the missing files again"
            )
        *leading, rows, groups, _ = files.shape(blocks)
        weight = Mxfp4Weight(
            name=name,
            shape=(*leading, rows, groups * _GROUP),
            formats=(find_format("mxfp4"),),
            parts=(blocks, scales),
            files=files,
        )
        found.add(weight)
    return found


def mxfp4_matrix(files: TensorFiles, name: str) -> "Mxfp4Weight":
    """Return the unread matrix whose codes are tensor `name`; `ModelError` without E8M0 scales."""
    scales = f"{name.removesuffix('.weight')}.scale"
    found, codes = files.entries.get(scales), files.entries[name]
    cols = 2 * codes.shape[-1] if codes.shape else 0
    expected = (*codes.shape[:-1], cols // _GROUP)
    if found is None or found.dtype != "F8_E8M0" or found.shape != expected or cols % _GROUP:
        is_there = "is missing" if found is None else f"is {found.dtype} of shape {found.shape}"
        raise ModelError(
            f"{scales} {is_there}, expected F8_E8M0 of shape {expected}, an exponent for {_GROUP} "
            f"of {cols} inputs of {name}; download the files again"
        )
    return Mxfp4Weight(
        name=name,
        shape=(*codes.shape[:-1], cols),
        formats=(find_format("mxfp4"),),
        parts=(name, scales),
        files=files,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Weight(FileWeight):
    """An unread matrix, or the matrices of a layer's experts; rows are always the outputs."""

    def fields(self, fmt: WeightFormat, expert: int | None) -> FileFields:
        """Return views of one matrix's codes and exponents in the file."""
        codes, scales = self._parts(expert)
        return FileFields(codes, self.shape[-2:], scales)

    def read(self, expert: int | None = None) -> Codes:
        """Read one matrix's codes and exponents."""
        codes, scales = self._parts(expert)
        return Codes("mxfp4", nibbles(codes), scales.contiguous())

    def _parts(self, expert: int | None) -> tuple[Tensor, Tensor]:
        """Return the bytes of codes (rows, inputs / 2) and of exponents (rows, groups)."""
        codes, scales = (self.files.read(part).view(torch.uint8) for part in self.parts)
        if expert is not None:
            codes, scales = codes[expert], scales[expert]
        return codes.flatten(1), scales
