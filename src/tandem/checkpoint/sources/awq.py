"""AWQ checkpoints of the gemm version: 4-bit codes with zero points, packed along the outputs.

`x.qweight` (inputs, outputs / 8) and `x.qzeros` (groups, outputs / 8) hold eight outputs a word, in
the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on; `x.scales` is (groups, outputs).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.checkpoint.sources.codes import Codes, StoredWeight, integer_formats, unpack_bits
from tandem.checkpoint.sources.files import JsonObject, TensorFiles
from tandem.checkpoint.sources.found import FileWeight, Found, checked_group_size
from tandem.core.errors import UnsupportedModelError

_BITS = 4
_PARTS = ("qweight", "qzeros", "scales")
_OUTPUT_OF_NIBBLE = [0, 2, 4, 6, 1, 3, 5, 7]
_NIBBLE_OF_OUTPUT = [_OUTPUT_OF_NIBBLE.index(output) for output in range(8)]


def find_awq(files: TensorFiles, config: JsonObject) -> Found:
    """Return the weights of an AWQ checkpoint; `UnsupportedModelError` for other versions."""
    version, bits = str(config.get("version", "gemm")).lower(), int(config.get("bits", _BITS))
    if version != "gemm" or bits != _BITS:
        raise UnsupportedModelError(
            f"{files.directory} is quantized by AWQ, version {version}, to {bits} bits; Tandem "
            "reads version gemm with 4 bits"
        )
    found = Found()
    for name in files.entries:
        prefix, _, part = name.rpartition(".")
        if part == "qweight":
            parts = [f"{prefix}.{p}" for p in _PARTS if f"{prefix}.{p}" in files]
            found.add(_weight(files, prefix, config, parts), parts)
    return found


def _weight(files: TensorFiles, prefix: str, config: JsonObject, parts: list[str]) -> StoredWeight:
    cols, words = files.shape(f"{prefix}.qweight")
    rows = words * 8
    group_size = checked_group_size(files, prefix, int(config.get("group_size", 128)), rows, cols)
    has_zeros = f"{prefix}.qzeros" in files
    formats = integer_formats(_BITS, cols, group_size, has_zeros=has_zeros)
    return AwqWeight(
        name=f"{prefix}.weight",
        shape=(rows, cols),
        formats=formats,
        why_not="" if formats else f"AWQ codes in groups of {group_size}",
        num_bytes=files.num_bytes(*parts),
        files=files,
        has_zeros=has_zeros,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AwqWeight(FileWeight):
    """One linear layer's weight."""

    has_zeros: bool

    def read(self, expert: int | None = None) -> Codes:
        """Read codes, scales and zero points."""
        prefix = self.name.removesuffix(".weight")
        codes = _in_order(self.files.read(f"{prefix}.qweight")).T.contiguous()
        scales = self.files.read(f"{prefix}.scales").T.contiguous()
        if not self.has_zeros:
            return Codes("int", codes.to(torch.int16) - 8, scales)
        zeros = _in_order(self.files.read(f"{prefix}.qzeros")).T.contiguous()
        return Codes("int", codes, scales, zeros)


def _in_order(words: Tensor) -> Tensor:
    """Unpack (n, outputs / 8) words to (n, outputs) numbers."""
    nibbles = unpack_bits(words, _BITS).unflatten(-1, (-1, 8))
    ordered: Tensor = nibbles[..., _NIBBLE_OF_OUTPUT]
    return ordered.flatten(-2)
