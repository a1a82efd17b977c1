"""Writes a GGUF of Qwen3-30B-A3B's shape with random weights, for llama.cpp to do the same work."""

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from tandem.bench.model_shapes import find_shape

SHAPE = "qwen3-30b-a3b"
_TILE_ROWS = 256  # that are drawn and quantised; a matrix repeats them
_BYTE_TOKENS = 259  # three special ones, then every byte

Matrix = tuple[str, tuple[int, ...], bool]  # name, shape in torch's order, whether it is quantised


def write_random_gguf(path: Path, layers: int, vocabulary: int, quantisation: str) -> None:
    """Write `layers` layers with a vocabulary of so many tokens in Q4_0, Q8_0 or BF16.

    Tensors go to the file one by one: the memory needed is that of the largest.
    """
    values = find_shape(SHAPE).values | {"num_hidden_layers": layers, "vocab_size": vocabulary}
    kind = gguf.GGMLQuantizationType[quantisation]
    writer = gguf.GGUFWriter(path, "qwen3moe")
    _add_metadata(writer, values)
    _add_tokens(writer, vocabulary)
    matrices = list(_matrices(values))
    for name, shape, is_quantised in matrices:
        _announce(writer, name, shape, kind if is_quantised else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    tiles: dict[int, NDArray[np.uint8]] = {}
    for name, shape, is_quantised in matrices:
        if not is_quantised:
            plain = np.ones(shape) if name.endswith("norm.weight") else _normal(shape)
            writer.write_tensor_data(plain.astype(np.float32))
            continue
        if shape[-1] not in tiles:
            tile = _normal((_TILE_ROWS, shape[-1])).astype(np.float32)
            tiles[shape[-1]] = gguf.quants.quantize(tile, kind).view(np.uint8)
        num_rows = int(np.prod(shape[:-1]))
        repeated = np.tile(tiles[shape[-1]], (-(-num_rows // _TILE_ROWS), 1))[:num_rows]
        writer.write_tensor_data(repeated)
    writer.close()


def _normal(shape: tuple[int, ...]) -> NDArray[np.float64]:
    values: NDArray[np.float64] = np.random.default_rng(0).standard_normal(shape)
    return values / float(np.sqrt(shape[-1]))


def _announce(
    writer: gguf.GGUFWriter,
    name: str,
    shape: tuple[int, ...],
    kind: gguf.GGMLQuantizationType | None,
) -> None:
    if kind is None:
        num_bytes = int(np.prod(shape)) * 4
        writer.add_tensor_info(name, shape, np.dtype(np.float32), num_bytes)
        return
    row_bytes = gguf.quant_shape_to_byte_shape(shape, kind)
    num_bytes = int(np.prod(row_bytes))
    writer.add_tensor_info(name, row_bytes, np.dtype(np.uint8), num_bytes, raw_dtype=kind)


def _add_metadata(writer: gguf.GGUFWriter, values: dict[str, int]) -> None:
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_head_count(values["num_attention_heads"])
    writer.add_head_count_kv(values["num_key_value_heads"])
    writer.add_key_length(values["head_dim"])
    writer.add_value_length(values["head_dim"])
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(values["num_experts"])
    writer.add_expert_used_count(values["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(values["moe_intermediate_size"])


def _add_tokens(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    plain = vocabulary - _BYTE_TOKENS
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*tokens, *(f"t{i}" for i in range(plain))])
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * plain)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _matrices(values: dict[str, int]) -> Iterator[Matrix]:
    hidden, head = values["hidden_size"], values["head_dim"]
    queries = values["num_attention_heads"] * head
    keys = values["num_key_value_heads"] * head
    experts, inner = values["num_experts"], values["moe_intermediate_size"]
    yield "token_embd.weight", (values["vocab_size"], hidden), True
    yield "output.weight", (values["vocab_size"], hidden), True
    yield "output_norm.weight", (hidden,), False
    for layer in range(values["num_hidden_layers"]):
        block = f"blk.{layer}"
        for name, size in (
            ("attn_norm", hidden), ("ffn_norm", hidden), ("attn_q_norm", head),
            ("attn_k_norm", head),
        ):  # fmt: skip
            yield f"{block}.{name}.weight", (size,), False
        yield f"{block}.attn_q.weight", (queries, hidden), True
        yield f"{block}.attn_k.weight", (keys, hidden), True
        yield f"{block}.attn_v.weight", (keys, hidden), True
        yield f"{block}.attn_output.weight", (hidden, queries), True
        yield f"{block}.ffn_gate_inp.weight", (experts, hidden), False
        yield f"{block}.ffn_gate_exps.weight", (experts, inner, hidden), True
        yield f"{block}.ffn_up_exps.weight", (experts, inner, hidden), True
        yield f"{block}.ffn_down_exps.weight", (experts, hidden, inner), True
