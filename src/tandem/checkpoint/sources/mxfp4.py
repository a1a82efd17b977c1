"""MXFP4 checkpoints (gpt-oss): e2m1 codes with one E8M0 exponent for 32 inputs.

`x_blocks` (num_experts, outputs, groups, 16) holds two codes a byte, the first in the low bits;
`x_scales` (num_experts, outputs, groups) are the exponents' bytes.
"""

from dataclasses import dataclass

from torch import Tensor

from tandem.checkpoint.json_files import JsonObject
from tandem.checkpoint.sources.codes import Codes, nibbles
from tandem.checkpoint.sources.files import TensorFiles
from tandem.checkpoint.sources.found import FileWeight, Found
from tandem.core.errors import ModelError
from tandem.kernels.formats import WeightFormat, find_format
from tandem.kernels.formats.file_rows import FileFields

_BLOCKS, _SCALES = "_blocks", "_scales"


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
            shape=(*leading, rows, groups * 32),
            formats=(find_format("mxfp4"),),
            parts=(blocks, scales),
            files=files,
        )
        found.add(weight)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Weight(FileWeight):
    """The fused weight of a layer's experts; rows are the outputs, whatever the model's order."""

    def fields(self, fmt: WeightFormat, expert: int | None) -> FileFields:
        """Return one expert's codes and exponents where they lie."""
        blocks, scales = self._parts(expert)
        return FileFields(blocks.flatten(1), self.shape[-2:], scales)

    def read(self, expert: int | None = None) -> Codes:
        """Read one expert's codes and exponents."""
        blocks, scales = self._parts(expert)
        return Codes("mxfp4", nibbles(blocks).flatten(1), scales.contiguous())

    def _parts(self, expert: int | None) -> tuple[Tensor, Tensor]:
        """Return (rows, groups, 16) codes and (rows, groups) exponents."""
        blocks, scales = map(self.files.read, self.parts)
        return (blocks, scales) if expert is None else (blocks[expert], scales[expert])
