"""Finds the packed format that holds GGUF blocks of a type, and converts their codes."""

from collections.abc import Collection
from functools import cache

import torch
from torch import Tensor

from tandem.kernels.formats import WeightFormat, find_format

# GGUF type -> the packed format that holds it.
FORMATS = {
    "Q4_0": "int4-g32", "Q4_1": "int4z-g32", "Q5_0": "int5-g32", "Q5_1": "int5z-g32",
    "Q8_0": "int8-g32", "MXFP4": "mxfp4", "NVFP4": "nvfp4",
    "Q2_K": "q2_k", "Q3_K": "q3_k", "Q4_K": "q4_k", "Q5_K": "q5_k", "Q6_K": "q6_k",
    "IQ4_NL": "iq4_nl", "IQ4_XS": "iq4_xs", "IQ3_XXS": "iq3_xxs", "IQ3_S": "iq3_s",
    "IQ2_XXS": "iq2_xxs", "IQ2_XS": "iq2_xs", "IQ2_S": "iq2_s", "IQ1_S": "iq1_s", "IQ1_M": "iq1_m",
}  # fmt: skip
# Other formats that hold a format's codes exactly, smallest first. A matrix whose parts have
# different types needs one.
_WIDER = {
    "int4-g32": ("int5-g32", "int8-g32"), "int5-g32": ("int8-g32",), "iq4_nl": ("int8-g32",),
    "int4z-g32": ("int5z-g32",), "q4_k": ("q5_k",), "q3_k": ("q6_k",),
}  # fmt: skip


def common_format(kinds: Collection[str]) -> WeightFormat | None:
    """Return the smallest packed format that holds blocks of all these types; None if none does."""
    held = [(name, *_WIDER.get(name, ())) for name in map(FORMATS.get, kinds) if name is not None]
    common = [name for name in held[0] if all(name in others for others in held)] if held else []
    return find_format(common[0]) if common and len(held) == len(kinds) else None


@cache
def code_table(kind: str, fmt: WeightFormat) -> Tensor | None:
    """Return the `FileBlocks.table` that converts codes of GGUF type `kind` to codes of `fmt`.

    Returns None if the codes are the same.
    """
    own = find_format(FORMATS[kind])
    if own == fmt:
        return None
    codes = torch.arange(256, device="cpu")
    if own.encoding.table:  # codes become the table's integers
        values = torch.tensor(own.encoding.table, device="cpu")
        codes[: len(values)] = values.long()
    return (codes + fmt.encoding.offset - own.encoding.offset).to(torch.uint8)
