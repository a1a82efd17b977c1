"""llama.cpp's quantisation library, and the type of each matrix in its files."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class Ggml:
    """llama.cpp's quantisation library, as an installed llama-cpp-python provides it."""

    def __init__(self) -> None:
        """Raises `ImportError` if it is not installed."""
        import llama_cpp

        folder = Path(llama_cpp.__file__).parent / "lib"
        self._library = ctypes.CDLL(str(folder / "libggml-base.so"))
        self._library.ggml_quantize_chunk.restype = ctypes.c_size_t
        self._library.ggml_quantize_chunk.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p,
        ]  # fmt: skip
        self._library.ggml_get_type_traits.restype = ctypes.POINTER(_TypeTraits)

    def quantize(self, values: Floats, kind: GGMLQuantizationType) -> NDArray[np.uint8]:
        """Quantise rows to blocks, with equal importance of all columns: (..., bytes)."""
        values = np.ascontiguousarray(values)
        out = self.room(values, kind)
        importance = np.ones(values.shape[-1], dtype=np.float32)
        self.quantize_rows(values, out, kind, 0, values.size // values.shape[-1], importance)
        return out

    def room(self, values: Floats, kind: GGMLQuantizationType) -> NDArray[np.uint8]:
        """Return memory for the blocks of rows, already written once."""
        block, size = gguf.GGML_QUANT_SIZES[kind]
        return np.zeros((*values.shape[:-1], values.shape[-1] // block * size), dtype=np.uint8)

    def quantize_rows(
        self,
        values: Floats,
        out: NDArray[np.uint8],
        kind: GGMLQuantizationType,
        first: int,
        count: int,
        importance: Floats | None = None,
    ) -> None:
        """Quantise some of the rows to their place in `out`."""
        cols = values.shape[-1]
        weights = None if importance is None else importance.ctypes.data
        self._library.ggml_quantize_chunk(
            int(kind), values.ctypes.data, out.ctypes.data, first * cols, count, cols, weights
        )

    def dequantize(self, blocks: NDArray[np.uint8], kind: GGMLQuantizationType) -> Floats:
        """Return the values of blocks by llama.cpp's reference: (..., cols)."""
        blocks = np.ascontiguousarray(blocks)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        out = np.empty((*blocks.shape[:-1], blocks.shape[-1] // size * block), dtype=np.float32)
        traits = self._library.ggml_get_type_traits(int(kind)).contents
        traits.to_float(blocks.ctypes.data, out.ctypes.data, out.size)
        return out


class _TypeTraits(ctypes.Structure):
    """The beginning of ggml's record of a type."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block_size", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


def kinds_of(
    name: str, num_layers: int, *, is_tied: bool = True
) -> Callable[[str], GGMLQuantizationType]:
    """Return the type of each matrix in a file of a type, or of llama.cpp's mixture Q4_K_M."""

    usual = GGMLQuantizationType.Q4_K

    def mixed(tensor: str) -> GGMLQuantizationType:
        if not tensor.startswith("blk."):  # embeddings, often the head too
            return GGMLQuantizationType.Q6_K if is_tied or "output" in tensor else usual
        number = int(tensor.split(".")[1])
        has_more = number < num_layers // 8 or number % 3 == 2 or number >= 7 * num_layers // 8
        is_larger = has_more and ("attn_v" in tensor or "ffn_down" in tensor)
        return GGMLQuantizationType.Q6_K if is_larger else usual

    return mixed if name == "Q4_K_M" else lambda _: GGMLQuantizationType[name]
