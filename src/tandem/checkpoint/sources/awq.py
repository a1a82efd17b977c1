"""AWQ checkpoints of the gemm version: 4-bit codes with zero points, packed along the outputs.

`x.qweight` (inputs, outputs / 8) and `x.qzeros` (groups, outputs / 8) hold eight outputs per word,
in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up; `x.scales` is (groups, outputs).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.checkpoint.json_files import JsonObject
from tandem.checkpoint.sources.codes import Codes, integer_formats, unpack_bits
from tandem.checkpoint.sources.files import TensorFiles
from tandem.checkpoint.sources.found import FileWeight, Found, checked_group_size
from tandem.core.errors import UnsupportedModelError
from tandem.kernels.formats import WeightFormat
from tandem.kernels.formats.file_rows import FileFields
from tandem.kernels.formats.source_codes import minima_of

_BITS = 4
_OUTPUT_OF_NIBBLE = [0, 2, 4, 6, 1, 3, 5, 7]
_NIBBLE_OF_OUTPUT = [_OUTPUT_OF_NIBBLE.index(output) for output in range(8)]
_PLACES = sum(nibble << 4 * output for output, nibble in enumerate(_NIBBLE_OF_OUTPUT))


def find_awq(files: TensorFiles, config: JsonObject) -> Found:
    """Return the weights of an AWQ checkpoint.

    Raises `UnsupportedModelError` for versions other than gemm, and for other widths than 4 bits.
    """
    version, bits = str(config.get("version", "gemm")).lower(), int(config.get("bits", _BITS))
    if version != "gemm" or bits != _BITS:
        raise UnsupportedModelError(
            f"{files.directory} is quantized by AWQ, version {version}, to {bits} bits; Tandem "
            "reads version gemm with 4 bits"
        )
    found = Found()
    for prefix, parts in files.layers_with("qweight", ("qzeros", "scales")):
        found.add(_weight(files, prefix, config, parts))
    return found


def _weight(files: TensorFiles, prefix: str, config: JsonObject, parts: list[str]) -> "AwqWeight":
    cols, words = files.shape(f"{prefix}.qweight")
    rows = words * 8
    group_size = checked_group_size(files, prefix, int(config.get("group_size", 128)), rows, cols)
    has_zeros = f"{prefix}.qzeros" in files
    return AwqWeight(
        name=f"{prefix}.weight",
        shape=(rows, cols),
        formats=integer_formats(_BITS, cols, group_size, has_zeros=has_zeros),
        what=f"AWQ codes in groups of {group_size}",
        parts=parts,
        files=files,
        has_zeros=has_zeros,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AwqWeight(FileWeight):
    """The unread weight of one linear layer."""

    has_zeros: bool

    def fields(self, fmt: WeightFormat, expert: int | None) -> FileFields | None:
        """Return views of the codes and scales in the file; None if `fmt` does not have 4 bits."""
        if fmt.bits != _BITS:
            return None
        words, scales, zeros = self._parts()
        minima = None if zeros is None else minima_of(zeros, scales)
        return FileFields(words.T, self.shape, scales, minima, places=_PLACES)

    def read(self, expert: int | None = None) -> Codes:
        """Read codes, scales and zero points."""
        words, scales, zeros = self._parts()
        codes = _in_order(words).T.contiguous()
        if zeros is None:
            return Codes("int", codes.to(torch.int16) - 8, scales.contiguous())
        return Codes("int", codes, scales.contiguous(), zeros.contiguous())

    def _parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return words (inputs, outputs / 8), scales (outputs, groups) and zero points.

        Zero points have the shape of scales; None if the checkpoint has none.
        """
        words, scales = self.read_part("qweight"), self.read_part("scales").T
        return words, scales, _in_order(self.read_part("qzeros")).T if self.has_zeros else None


def _in_order(words: Tensor) -> Tensor:
    """Unpack words (n, outputs / 8) to numbers (n, outputs) in the order of the outputs."""
    nibbles = unpack_bits(words, _BITS).unflatten(-1, (-1, 8))
    ordered: Tensor = nibbles[..., _NIBBLE_OF_OUTPUT]
    return ordered.flatten(-2)
