"""GPTQ checkpoints: codes of 4 or 8 bits along the inputs, with or without activation order.

`x.qweight` (inputs * bits / 32, outputs) and `x.qzeros` (groups, outputs * bits / 32) hold the
lowest bits first, `x.scales` is (groups, outputs), `x.g_idx` (inputs,) is the group of each input.
Zero points are stored minus one, except in `checkpoint_format` gptq_v2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.checkpoint.json_files import JsonObject
from tandem.checkpoint.sources.codes import (
    Codes,
    input_order,
    integer_formats,
    unpack_bits,
)
from tandem.checkpoint.sources.files import TensorFiles
from tandem.checkpoint.sources.found import FileWeight, Found, checked_group_size
from tandem.core.errors import ModelError, UnsupportedModelError
from tandem.kernels.formats import WeightFormat
from tandem.kernels.formats.file_rows import FileFields
from tandem.kernels.formats.source_codes import minima_of


def find_gptq(files: TensorFiles, config: JsonObject) -> Found:
    """Return a GPTQ checkpoint's weights; `UnsupportedModelError` for other than 4 or 8 bits."""
    bits = int(config.get("bits", 4))
    if bits not in (4, 8):
        raise UnsupportedModelError(
            f"{files.directory} is quantized by GPTQ to {bits} bits; Tandem reads 4 and 8"
        )
    found = Found()
    for prefix, parts in files.layers_with("qweight", ("qzeros", "scales", "g_idx")):
        found.add(_weight(files, prefix, bits, config, parts))
    return found


def _weight(
    files: TensorFiles, prefix: str, bits: int, config: JsonObject, parts: list[str]
) -> "GptqWeight":
    words, rows = files.shape(f"{prefix}.qweight")
    cols = words * 32 // bits
    group_size = checked_group_size(files, prefix, int(config.get("group_size", -1)), rows, cols)
    is_symmetric = bool(config.get("sym", True))
    what = f"GPTQ codes of {bits} bits in groups of {group_size}"
    return GptqWeight(
        name=f"{prefix}.weight",
        shape=(rows, cols),
        formats=integer_formats(bits, cols, group_size, has_zeros=not is_symmetric),
        what=what if is_symmetric else f"{what} with zero points",
        parts=parts,
        files=files,
        is_ordered=bool(config.get("desc_act", False)) and f"{prefix}.g_idx" in files,
        bits=bits,
        group_size=group_size,
        is_symmetric=is_symmetric,
        zero_offset=0 if config.get("checkpoint_format") == "gptq_v2" else 1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqWeight(FileWeight):
    """The unread weight of one linear layer, with 4- or 8-bit codes packed into int32 words."""

    bits: int
    group_size: int
    is_symmetric: bool
    zero_offset: int

    def fields(self, fmt: WeightFormat, expert: int | None) -> FileFields | None:
        """Return views of the codes and scales in the file.

        Returns None if the inputs are reordered or `fmt` has another number of bits.
        """
        if fmt.bits != self.bits or self._order() is not None:
            return None
        words, scales, zeros = self._parts()
        minima = None if self._are_middle(zeros) else minima_of(zeros, scales)
        return FileFields(words, self.shape, scales, minima)

    def read(self, expert: int | None = None) -> Codes:
        """Read codes, scales, zero points and the order of the inputs."""
        words, scales, zeros = self._parts()
        codes, order = unpack_bits(words.contiguous(), self.bits), self._order()
        if order is not None:
            codes = codes[:, order]
        if not self._are_middle(zeros):
            return Codes("int", codes, scales.contiguous(), zeros.contiguous(), order)
        middle = 1 << (self.bits - 1)
        return Codes("int", codes.to(torch.int16) - middle, scales.contiguous(), None, order)

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return words, scales and zero points, each with one row per output."""
        words, scales, zeros = map(self.read_part, ("qweight", "scales", "qzeros"))
        return words.T, scales.T, unpack_bits(zeros, self.bits).T + self.zero_offset

    def _order(self) -> Tensor | None:
        name = f"{self.name.removesuffix('.weight')}.g_idx"
        if name not in self.files:
            return None
        return input_order(self.files.read(name), self.group_size, name)

    def _are_middle(self, zeros: Tensor) -> bool:
        """Whether the config calls the codes symmetric; `ModelError` if `zeros` show otherwise."""
        middle = 1 << (self.bits - 1)
        if self.is_symmetric and not (zeros == middle).all():
            raise ModelError(
                f"{self.name} has zero points other than {middle}, but config.json says that its "
                "codes are symmetric; set sym to false there"
            )
        return self.is_symmetric
