"""The packed weight formats in torch: the reference of packing and unpacking."""

from tandem.kernels.formats.blocks import CodedMatrix
from tandem.kernels.formats.expert import ExpertLayout, pack_expert, unpack_expert
from tandem.kernels.formats.packed import PackedMatrix, pack, unpack
from tandem.kernels.formats.weight_format import (
    FORMATS,
    LAYOUT_VERSION,
    WeightFormat,
    find_format,
)

__all__ = [
    "FORMATS",
    "LAYOUT_VERSION",
    "CodedMatrix",
    "ExpertLayout",
    "PackedMatrix",
    "WeightFormat",
    "find_format",
    "pack",
    "pack_expert",
    "unpack",
    "unpack_expert",
]
