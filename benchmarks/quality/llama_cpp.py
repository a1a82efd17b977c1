"""llama.cpp's own quantiser on the judge's weights: files of its types, with or without importance.

Needs llama-cpp-python; `benchmarks.quality.curve` measures the files.
"""

import ctypes
from collections.abc import Iterator, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3MoeForCausalLM

# Of llama.h's llama_ftype; those of NEEDS_IMPORTANCE are refused without an imatrix.
TYPES = {
    "Q4_0": 2, "Q8_0": 7, "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14,
    "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "IQ2_XXS": 19, "IQ2_XS": 20,
    "IQ3_XS": 22, "IQ3_XXS": 23, "IQ4_NL": 25, "IQ3_S": 26, "IQ3_M": 27, "IQ2_S": 28, "IQ2_M": 29,
    "IQ4_XS": 30,
}  # fmt: skip
NEEDS_IMPORTANCE = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS")
_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
Array = NDArray[np.float32]


def write_judge(directory: Path, file: Path) -> None:
    """Write the judge in fp32, which stores its bf16 weights exactly."""
    model = Qwen3MoeForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = model.config
    writer = gguf.GGUFWriter(file, "qwen3moe")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    _add_tokens(writer, directory)
    for name, tensor in _tensors(model):
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokens(writer: gguf.GGUFWriter, directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    own = tokenizer.backend_tokenizer
    words = sorted(own.get_vocab().items(), key=lambda pair: pair[1])
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([word for word, _ in words])
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if word in special else normal for word, _ in words])
    merges = gguf.SpecialVocab(directory, load_merges=True).merges
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokenizer.eos_token_id)


def _tensors(model: Qwen3MoeForCausalLM) -> Iterator[tuple[str, Array]]:
    """Yield tensors by llama.cpp's names."""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    yield "token_embd.weight", state["model.embed_tokens.weight"]
    yield "output_norm.weight", state["model.norm.weight"]
    yield "output.weight", state["lm_head.weight"]
    for layer in range(model.config.num_hidden_layers):
        above, block = f"model.layers.{layer}", f"blk.{layer}"
        for theirs, name in _NAMES.items():
            yield f"{block}.{name}.weight", state[f"{above}.{theirs}.weight"]
        gate, up = np.split(state[f"{above}.mlp.experts.gate_up_proj"], 2, axis=1)
        yield f"{block}.ffn_gate_exps.weight", np.ascontiguousarray(gate)
        yield f"{block}.ffn_up_exps.weight", np.ascontiguousarray(up)
        yield f"{block}.ffn_down_exps.weight", state[f"{above}.mlp.experts.down_proj"]


def imatrix_of(file: Path, num_layers: int) -> dict[str, Array]:
    """Return the input of llama.cpp's quantiser from a file of `tandem importance`.

    Experts that no token reached get ones, as in llama.cpp; the head is left out, as by its tool.
    """
    found = load_file(file)

    def squares(parameter: str) -> Array:
        own, tokens = found[f"{parameter}.mean_square"], found[f"{parameter}.tokens"]
        return torch.where(tokens[:, None] > 0, own, 1.0).flatten().float().numpy()

    imatrix = {}
    for layer in range(num_layers):
        above, block = f"model.layers.{layer}", f"blk.{layer}"
        for theirs, name in _NAMES.items():
            if theirs.endswith("_proj"):
                imatrix[f"{block}.{name}.weight"] = squares(f"{above}.{theirs}.weight")
        up = squares(f"{above}.mlp.experts.gate_up_proj")
        imatrix |= {f"{block}.ffn_{name}_exps.weight": up for name in ("gate", "up")}
        down = squares(f"{above}.mlp.experts.down_proj")
        imatrix[f"{block}.ffn_down_exps.weight"] = down
    return imatrix


def quantise(source: Path, target: Path, kind: str, imatrix: Mapping[str, Array] | None) -> bool:
    """Let llama.cpp write a file of one of its types; False if it refuses."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = TYPES[kind], 2
    if imatrix is not None:
        kept = [
            llama_cpp.llama_model_imatrix_data(
                name.encode(), data.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), data.size
            )
            for name, data in imatrix.items()
        ]
        ends = llama_cpp.llama_model_imatrix_data(None, None, 0)
        array = (llama_cpp.llama_model_imatrix_data * (len(kept) + 1))(*kept, ends)
        params.imatrix = ctypes.cast(array, type(params.imatrix))
    path, out = str(source).encode(), str(target).encode()
    return int(llama_cpp.llama_model_quantize(path, out, ctypes.byref(params))) == 0
