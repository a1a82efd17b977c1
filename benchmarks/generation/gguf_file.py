"""Writes a GGUF of a released shape with random weights, so that llama.cpp does the same work."""

from pathlib import Path

import gguf
import numpy as np
from benchmarks.generation.gguf_architectures import (
    ARCHITECTURES,
    Matrix,
    add_common_metadata,
)
from benchmarks.loading.ggml import Ggml, kinds_of
from numpy.typing import NDArray

from tandem.bench.model_shapes import DENSE_SHAPES, MODEL_SHAPES, ModelShape, find_shape

# Those whose architecture a file can be written of.
SHAPES = [
    name
    for name, shape in (MODEL_SHAPES | DENSE_SHAPES).items()
    if shape.model_type in ARCHITECTURES
]

_TILE_ROWS = 256  # that are drawn and quantised; a matrix repeats them
_BYTE_TOKENS = 259  # three special ones, then every byte


def random_gguf(
    directory: Path, shape: str, num_layers: int, vocabulary: int, quantisation: str
) -> Path:
    """Return a file of a shape with some of its layers; write it if it is not in `directory`."""
    file = directory / f"{shape}-{num_layers}-{vocabulary}-{quantisation}.gguf"
    if not file.exists():
        directory.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".partial")
        sample = find_shape(shape).sample(num_layers)
        write_random_gguf(unfinished, sample, vocabulary, quantisation)
        unfinished.replace(file)
    return file


def write_random_gguf(path: Path, shape: ModelShape, vocabulary: int, quantisation: str) -> None:
    """Write a shape with a vocabulary of this size, with blocks of a type, or mixed as in Q4_K_M.

    K- and IQ-types need llama-cpp-python, whose library quantises. Tensors are written one by one,
    so the memory needed is that of the largest.
    """
    values = shape.values | {"vocab_size": vocabulary}
    architecture = ARCHITECTURES[shape.model_type]
    kind_of = kinds_of(quantisation, int(values["num_hidden_layers"]), is_tied=False)
    writer = gguf.GGUFWriter(path, architecture.name)
    add_common_metadata(writer, values)
    architecture.add_metadata(writer, values)
    add_tokens(writer, vocabulary)
    matrices = list(architecture.matrices(values))
    for matrix in matrices:
        _announce(writer, matrix, kind_of(matrix.name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    tiles: dict[tuple[int, int], NDArray[np.uint8]] = {}
    for name, size, is_quantised in matrices:
        if not is_quantised:
            writer.write_tensor_data(_plain_values(name, size).astype(np.float32))
            continue
        kind, cols = kind_of(name), size[-1]
        if (kind, cols) not in tiles:
            tiles[kind, cols] = _blocks(_normal((_TILE_ROWS, cols)).astype(np.float32), kind)
        num_rows = int(np.prod(size[:-1]))
        repeated = np.tile(tiles[kind, cols], (-(-num_rows // _TILE_ROWS), 1))[:num_rows]
        writer.write_tensor_data(repeated)
    writer.close()


def _blocks(values: NDArray[np.float32], kind: gguf.GGMLQuantizationType) -> NDArray[np.uint8]:
    try:
        blocks: NDArray[np.uint8] = gguf.quants.quantize(values, kind).view(np.uint8)
    except NotImplementedError:  # of types that the gguf package reads but does not write
        return Ggml().quantize(values, kind)
    return blocks


def _plain_values(name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return values that keep activations and states in their usual range."""
    if name.endswith("ssm_a"):
        return np.full(shape, -1.0)  # states fade
    if name.endswith(".bias"):
        return np.zeros(shape)
    if any(word in name for word in ("norm", "scale", "rope_freqs")):
        return np.ones(shape)
    return _normal(shape)


def _normal(shape: tuple[int, ...]) -> NDArray[np.float64]:
    values: NDArray[np.float64] = np.random.default_rng(0).standard_normal(shape)
    return values / float(np.sqrt(shape[-1]))


def _announce(writer: gguf.GGUFWriter, matrix: Matrix, kind: gguf.GGMLQuantizationType) -> None:
    name, shape, is_quantised = matrix
    if not is_quantised:
        num_bytes = int(np.prod(shape)) * 4
        writer.add_tensor_info(name, shape, np.dtype(np.float32), num_bytes)
        return
    row_bytes = gguf.quant_shape_to_byte_shape(shape, kind)
    num_bytes = int(np.prod(row_bytes))
    writer.add_tensor_info(name, row_bytes, np.dtype(np.uint8), num_bytes, raw_dtype=kind)


def add_tokens(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    """Add a byte tokenizer, with names for the rest of a vocabulary."""
    plain = vocabulary - _BYTE_TOKENS
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*tokens, *(f"t{i}" for i in range(plain))])
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * plain)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
