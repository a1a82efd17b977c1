"""The packed weight formats in torch: the reference of packing and unpacking."""

from tandem.kernels.formats.blocks import CodedMatrix
from tandem.kernels.formats.expert import ExpertLayout, unpack_expert
from tandem.kernels.formats.packed import PackedMatrix, pack, unpack
from tandem.kernels.formats.source_codes import coded_matrix
from tandem.kernels.formats.weight_format import (
    FORMATS,
    WeightFormat,
    find_format,
)

__all__ = [
    "FORMATS",
    "CodedMatrix",
    "ExpertLayout",
    "PackedMatrix",
    "WeightFormat",
    "coded_matrix",
    "find_format",
    "pack",
    "unpack",
    "unpack_expert",
]
