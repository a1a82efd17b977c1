"""GPTQ checkpoints: codes of 4 or 8 bits along the inputs, with or without activation order.

`x.qweight` (inputs * bits / 32, outputs) and `x.qzeros` (groups, outputs * bits / 32) hold the
lowest bits first, `x.scales` is (groups, outputs), `x.g_idx` (inputs,) is the group of each input.
Zero points are stored less one, except in `checkpoint_format` gptq_v2.
"""

from dataclasses import dataclass

import torch

from tandem.checkpoint.sources.codes import (
    Codes,
    StoredWeight,
    input_order,
    integer_formats,
    unpack_bits,
)
from tandem.checkpoint.sources.files import JsonObject, TensorFiles
from tandem.checkpoint.sources.found import FileWeight, Found, checked_group_size
from tandem.core.errors import ModelError, UnsupportedModelError

_PARTS = ("qweight", "qzeros", "scales", "g_idx")


def find_gptq(files: TensorFiles, config: JsonObject) -> Found:
    """Return the weights of a GPTQ checkpoint; raises `UnsupportedModelError` for odd widths."""
    bits = int(config.get("bits", 4))
    if bits not in (4, 8):
        raise UnsupportedModelError(
            f"{files.directory} is quantized by GPTQ to {bits} bits; Tandem reads 4 and 8"
        )
    found = Found()
    for name in files.entries:
        prefix, _, part = name.rpartition(".")
        if part == "qweight":
            parts = [f"{prefix}.{p}" for p in _PARTS if f"{prefix}.{p}" in files]
            found.add(_weight(files, prefix, bits, config, parts), parts)
    return found


def _weight(
    files: TensorFiles, prefix: str, bits: int, config: JsonObject, parts: list[str]
) -> StoredWeight:
    words, rows = files.shape(f"{prefix}.qweight")
    cols = words * 32 // bits
    group_size = checked_group_size(files, prefix, int(config.get("group_size", -1)), rows, cols)
    is_symmetric = bool(config.get("sym", True))
    formats = integer_formats(bits, cols, group_size, has_zeros=not is_symmetric)
    what = f"GPTQ codes of {bits} bits in groups of {group_size}"
    return GptqWeight(
        name=f"{prefix}.weight",
        shape=(rows, cols),
        formats=formats,
        why_not="" if formats else f"{what}{'' if is_symmetric else ' with zero points'}",
        num_bytes=files.num_bytes(*parts),
        files=files,
        is_ordered=bool(config.get("desc_act", False)) and f"{prefix}.g_idx" in files,
        bits=bits,
        group_size=group_size,
        is_symmetric=is_symmetric,
        zero_offset=0 if config.get("checkpoint_format") == "gptq_v2" else 1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqWeight(FileWeight):
    """One linear layer's weight."""

    bits: int
    group_size: int
    is_symmetric: bool
    zero_offset: int

    def read(self, expert: int | None = None) -> Codes:
        """Read codes, scales, zero points and the order of the inputs."""
        prefix, bits = self.name.removesuffix(".weight"), self.bits
        words = self.files.read(f"{prefix}.qweight").T.contiguous()
        codes = unpack_bits(words, bits)  # (rows, cols)
        scales = self.files.read(f"{prefix}.scales").T.contiguous()
        zeros = unpack_bits(self.files.read(f"{prefix}.qzeros"), bits).T + self.zero_offset
        order = None
        if f"{prefix}.g_idx" in self.files:
            name = f"{prefix}.g_idx"
            order = input_order(self.files.read(name), self.group_size, name)
        if order is not None:
            codes = codes[:, order]
        if not self.is_symmetric:
            return Codes("int", codes, scales, zeros.contiguous(), order)
        middle = 1 << (bits - 1)
        if not (zeros == middle).all():
            raise ModelError(
                f"{self.name} has zero points other than {middle}, but config.json says that its "
                "codes are symmetric; set sym to false there"
            )
        return Codes("int", codes.to(torch.int16) - middle, scales, None, order)
