"""The demo model as GGUF, padded with zeros so that rows are whole blocks of 256.

The hidden size is 768 instead of 576, and there are 12 heads instead of 9; norms see the same
numbers, so the model's function is the same. Matrices are quantised by `ggml_quantize_chunk` of
llama.cpp's own library.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from benchmarks.generation.gguf_file import add_tokens
from benchmarks.loading.ggml import Floats, Ggml
from gguf import GGMLQuantizationType
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

HIDDEN, HEADS, KV_HEADS = 768, 12, 4
_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "block_sparse_moe.gate": "ffn_gate_inp",
}  # fmt: skip
_EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}


def write_padded(
    file: Path,
    demo: Path,
    kind_of: Callable[[str], GGMLQuantizationType],
    ggml: Ggml,
    num_layers: int,
) -> None:
    """Write the first layers of the demo model; `kind_of` gives a matrix's type by its name."""
    writer = gguf.GGUFWriter(file, "llama")
    _add_metadata(writer, AutoConfig.from_pretrained(demo), num_layers)
    for name, values in _padded_tensors(demo, num_layers):
        if values.ndim < 2 or "ffn_gate_inp" in name:
            writer.add_tensor(name, values)
            continue
        kind = kind_of(name)
        writer.add_tensor(name, ggml.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_metadata(writer: gguf.GGUFWriter, config: Any, num_layers: int) -> None:
    writer.add_block_count(num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps * config.hidden_size / HIDDEN)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    add_tokens(writer, config.vocab_size)  # no text goes through it


def _padded_tensors(demo: Path, num_layers: int) -> Iterator[tuple[str, Floats]]:
    """Yield (GGUF name, values) of every tensor; a layer's experts are stacked."""
    tensors = _Tensors(demo)
    hidden = int(tensors["model.norm.weight"].shape[0])
    norm = (hidden / HIDDEN) ** 0.5  # the mean is over more numbers
    yield "token_embd.weight", _pad(tensors["model.embed_tokens.weight"])
    yield "output_norm.weight", _pad(tensors["model.norm.weight"] * norm)
    for layer in range(num_layers):
        for theirs, ours in _NAMES.items():
            values = tensors[f"model.layers.{layer}.{theirs}.weight"]
            if values.ndim == 1:
                values = values * norm
            if ours in ("attn_q", "attn_k"):  # pairs that are rotated together follow each other
                values = values.unflatten(0, (-1, 2, 32)).transpose(1, 2).flatten(0, 2)
            rows = {"attn_q": HIDDEN, "attn_k": 64 * KV_HEADS, "attn_v": 64 * KV_HEADS}
            rows["attn_output"] = HIDDEN
            yield f"blk.{layer}.{ours}.weight", _pad(values, rows.get(ours))
        for theirs, ours in _EXPERTS.items():
            prefix = f"model.layers.{layer}.block_sparse_moe.experts"
            each = [tensors[f"{prefix}.{expert}.{theirs}.weight"] for expert in range(8)]
            padded = [_pad(x, HIDDEN) if theirs == "w2" else _pad(x) for x in each]
            yield f"blk.{layer}.{ours}.weight", np.stack(padded)


class _Tensors:
    """The tensors of a directory by name, read one by one."""

    def __init__(self, directory: Path) -> None:
        opened: list[Any] = [safe_open(path, "pt") for path in directory.glob("*.safetensors")]
        self._files = {name: file for file in opened for name in list(file.keys())}

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor.float()


def _pad(values: Tensor, rows: int | None = None) -> Floats:
    """Return fp32 values, padded with zeros to the hidden size (columns) and to `rows`."""
    cols = HIDDEN if values.shape[-1] < HIDDEN else values.shape[-1]
    below = 0 if rows is None or values.ndim == 1 else rows - values.shape[0]
    padding = (0, cols - values.shape[-1], 0, below)[: 2 * values.ndim]
    padded: Floats = torch.nn.functional.pad(values, padding).numpy()
    return padded
