"""The metadata and tensors that llama.cpp requires in each architecture's GGUF file.

Names and orders are those of its converter; the content of tensors is not defined here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import gguf

Values = Mapping[str, Any]  # of a Transformers configuration

_HAS_STATE = ("linear_attention", "conv")


class Matrix(NamedTuple):
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    """The shape in torch's order."""
    is_quantised: bool = True


@dataclass(frozen=True, slots=True)
class Architecture:
    """How to write files of one architecture."""

    name: str
    """llama.cpp's name of the architecture."""
    add_metadata: Callable[[gguf.GGUFWriter, Values], None]
    """Adds the metadata specific to the architecture."""
    layer: Callable[[Values, int], Iterable[Matrix]]
    """Returns a layer's tensors; their names omit the layer."""
    output_norm: str = "output_norm.weight"
    shared: Callable[[Values], Iterable[Matrix]] = lambda values: ()
    """Returns the tensors outside of layers: embeddings, norm and head."""

    def matrices(self, values: Values) -> Iterator[Matrix]:
        """Yield all tensors of a file, without a head if it is tied to the embeddings."""
        hidden, vocabulary = values["hidden_size"], values["vocab_size"]
        yield Matrix("token_embd.weight", (vocabulary, hidden))
        yield _plain(self.output_norm, hidden)
        if not values.get("tie_word_embeddings"):
            yield Matrix("output.weight", (vocabulary, hidden))
        yield from self.shared(values)
        for layer in range(values["num_hidden_layers"]):
            for name, shape, is_quantised in self.layer(values, layer):
                yield Matrix(f"blk.{layer}.{name}", shape, is_quantised)


def add_common_metadata(writer: gguf.GGUFWriter, values: Values) -> None:
    """Add the metadata of every architecture; rotary bases and epsilons do not affect speed."""
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_head_count(values["num_attention_heads"])
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    if "moe_intermediate_size" not in values:
        return  # a dense model
    writer.add_expert_count(_num_experts(values))
    writer.add_expert_used_count(values.get("top_k_experts") or values["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(values["moe_intermediate_size"])


def _num_experts(values: Values) -> int:
    return int(values.get("num_experts") or values["n_routed_experts"])


def _kinds(values: Values) -> list[str]:
    return list(values.get("layer_types") or values["layers_block_type"])


def _plain(name: str, *shape: int) -> Matrix:
    return Matrix(name, shape, is_quantised=False)


def _add_heads(writer: gguf.GGUFWriter, values: Values) -> None:
    writer.add_head_count_kv(values["num_key_value_heads"])
    writer.add_key_length(values["head_dim"])
    writer.add_value_length(values["head_dim"])


def _attention(hidden: int, queries: int, keys: int, *, is_gated: bool = False) -> list[Matrix]:
    """Return the projections; a gate's rows are beside those of its query."""
    return [
        Matrix("attn_q.weight", (queries * (2 if is_gated else 1), hidden)),
        Matrix("attn_k.weight", (keys, hidden)),
        Matrix("attn_v.weight", (keys, hidden)),
        Matrix("attn_output.weight", (hidden, queries)),
    ]


def _head_norms(head: int) -> list[Matrix]:
    return [_plain("attn_q_norm.weight", head), _plain("attn_k_norm.weight", head)]


def _feed_forward(hidden: int, inner: int, suffix: str = "") -> list[Matrix]:
    return [
        Matrix(f"ffn_gate{suffix}.weight", (inner, hidden)),
        Matrix(f"ffn_up{suffix}.weight", (inner, hidden)),
        Matrix(f"ffn_down{suffix}.weight", (hidden, inner)),
    ]


def _experts(values: Values) -> list[Matrix]:
    num, inner = _num_experts(values), values["moe_intermediate_size"]
    hidden = values["hidden_size"]
    return [
        _plain("ffn_gate_inp.weight", num, hidden),
        Matrix("ffn_gate_exps.weight", (num, inner, hidden)),
        Matrix("ffn_up_exps.weight", (num, inner, hidden)),
        Matrix("ffn_down_exps.weight", (num, hidden, inner)),
    ]


# Qwen3, without experts and with them.


def _add_qwen3(writer: gguf.GGUFWriter, values: Values) -> None:
    _add_heads(writer, values)
    writer.add_feed_forward_length(values["intermediate_size"])


def _qwen3(values: Values, layer: int) -> Iterator[Matrix]:
    hidden, head = values["hidden_size"], values["head_dim"]
    yield from (_plain("attn_norm.weight", hidden), _plain("ffn_norm.weight", hidden))
    yield from _head_norms(head)
    yield from _attention(
        hidden, values["num_attention_heads"] * head, values["num_key_value_heads"] * head
    )
    if "moe_intermediate_size" in values:
        yield from _experts(values)
    else:
        yield from _feed_forward(hidden, values["intermediate_size"])


# Qwen3-Next and Qwen3.5: gated delta nets, and gated attention in every fourth layer.


def _add_delta_net(writer: gguf.GGUFWriter, values: Values) -> None:
    _add_heads(writer, values)
    heads, width = values["linear_num_value_heads"], values["linear_value_head_dim"]
    writer.add_expert_shared_feed_forward_length(values["shared_expert_intermediate_size"])
    writer.add_rope_dimension_count(values["head_dim"] // 4)
    writer.add_ssm_conv_kernel(values["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(values["linear_key_head_dim"])
    writer.add_ssm_group_count(values["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * width)
    recurrent = [kind in _HAS_STATE for kind in _kinds(values)]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)


def _add_qwen35moe(writer: gguf.GGUFWriter, values: Values) -> None:
    _add_delta_net(writer, values)
    writer.add_rope_dimension_sections([11, 11, 10, 0])  # of text and images


def _delta_net(values: Values, num_rates: int) -> Iterator[Matrix]:
    """Yield the tensors of gated delta nets; the rates' projections are one matrix or two."""
    hidden, heads = values["hidden_size"], values["linear_num_value_heads"]
    inner = heads * values["linear_value_head_dim"]
    keys = values["linear_num_key_heads"] * values["linear_key_head_dim"]
    mixed = 2 * keys + inner
    yield Matrix("attn_qkv.weight", (mixed, hidden))
    yield Matrix("attn_gate.weight", (inner, hidden))
    yield _plain("ssm_conv1d.weight", mixed, values["linear_conv_kernel_dim"])
    yield from (_plain("ssm_dt.bias", heads), _plain("ssm_a", heads))
    names = ("ssm_ba",) if num_rates == 1 else ("ssm_beta", "ssm_alpha")
    for name in names:
        yield Matrix(f"{name}.weight", (2 * heads // num_rates, hidden))
    yield _plain("ssm_norm.weight", values["linear_value_head_dim"])
    yield Matrix("ssm_out.weight", (hidden, inner))


def _qwen_hybrid(values: Values, layer: int, num_rates: int) -> Iterator[Matrix]:
    hidden, head = values["hidden_size"], values["head_dim"]
    yield from (
        _plain("attn_norm.weight", hidden),
        _plain("post_attention_norm.weight", hidden),
    )
    if _kinds(values)[layer] in _HAS_STATE:
        yield from _delta_net(values, num_rates)
    else:
        queries = values["num_attention_heads"] * head
        keys = values["num_key_value_heads"] * head
        yield from _attention(hidden, queries, keys, is_gated=True)
        yield from _head_norms(head)
    yield from _experts(values)
    yield _plain("ffn_gate_inp_shexp.weight", hidden)
    yield from _feed_forward(hidden, values["shared_expert_intermediate_size"], "_shexp")


def _qwen3next(values: Values, layer: int) -> Iterator[Matrix]:
    return _qwen_hybrid(values, layer, num_rates=1)


def _qwen35moe(values: Values, layer: int) -> Iterator[Matrix]:
    return _qwen_hybrid(values, layer, num_rates=2)


# LFM2: short convolutions, and experts after the first layers.


def _add_lfm2moe(writer: gguf.GGUFWriter, values: Values) -> None:
    heads = values["num_key_value_heads"]
    writer.add_head_count_kv([0 if kind in _HAS_STATE else heads for kind in _kinds(values)])
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_leading_dense_block_count(values["num_dense_layers"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_vocab_size(values["vocab_size"])
    writer.add_shortconv_l_cache(values["conv_L_cache"])


def _lfm2moe(values: Values, layer: int) -> Iterator[Matrix]:
    hidden = values["hidden_size"]
    yield from (_plain("attn_norm.weight", hidden), _plain("ffn_norm.weight", hidden))
    if _kinds(values)[layer] in _HAS_STATE:
        yield _plain("shortconv.conv.weight", hidden, values["conv_L_cache"])
        yield Matrix("shortconv.in_proj.weight", (3 * hidden, hidden))
        yield Matrix("shortconv.out_proj.weight", (hidden, hidden))
    else:
        head = hidden // values["num_attention_heads"]
        yield from _attention(hidden, hidden, values["num_key_value_heads"] * head)
        yield from _head_norms(head)
    if layer < values["num_dense_layers"]:
        yield from _feed_forward(hidden, values["intermediate_size"])
    else:
        yield from _experts(values)
        yield _plain("exp_probs_b.bias", _num_experts(values))


# Gemma 4: windows, other heads in layers without one, a feed-forward beside the experts.


def _add_gemma4(writer: gguf.GGUFWriter, values: Values) -> None:
    has_window = [kind == "sliding_attention" for kind in _kinds(values)]
    few, many = values["num_global_key_value_heads"], values["num_key_value_heads"]
    writer.add_head_count_kv([many if one else few for one in has_window])
    writer.add_key_length(values["global_head_dim"])
    writer.add_value_length(values["global_head_dim"])
    writer.add_key_length_swa(values["head_dim"])
    writer.add_value_length_swa(values["head_dim"])
    writer.add_rope_dimension_count(values["global_head_dim"])
    writer.add_rope_dimension_count_swa(values["head_dim"])
    writer.add_sliding_window(values["sliding_window"])
    writer.add_sliding_window_pattern(has_window)
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_embedding_length_per_layer_input(values["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(0)
    writer.add_final_logit_softcapping(values["final_logit_softcapping"])


def _gemma4(values: Values, layer: int) -> Iterator[Matrix]:
    hidden, inner = values["hidden_size"], values["moe_intermediate_size"]
    num = _num_experts(values)
    yield from _gemma4_attention(values, has_window=_kinds(values)[layer] == "sliding_attention")
    for name in (
        "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "pre_ffw_norm_2",
        "post_ffw_norm_1", "post_ffw_norm_2",
    ):  # fmt: skip
        yield _plain(f"{name}.weight", hidden)
    yield _plain("layer_output_scale.weight", 1)
    yield from _feed_forward(hidden, values["intermediate_size"])
    yield _plain("ffn_gate_inp.weight", num, hidden)
    yield _plain("ffn_gate_inp.scale", hidden)
    yield Matrix("ffn_gate_up_exps.weight", (num, 2 * inner, hidden))
    yield Matrix("ffn_down_exps.weight", (num, hidden, inner))
    yield _plain("ffn_down_exps.scale", num)


def _gemma4_attention(values: Values, *, has_window: bool) -> Iterator[Matrix]:
    head, heads = values["head_dim"], values["num_key_value_heads"]
    if not has_window:
        head, heads = values["global_head_dim"], values["num_global_key_value_heads"]
    queries = values["num_attention_heads"] * head
    for matrix in _attention(values["hidden_size"], queries, heads * head):
        if has_window or matrix.name != "attn_v.weight":  # values are the keys there
            yield matrix
    yield from _head_norms(head)


def _gemma4_shared(values: Values) -> list[Matrix]:
    return [_plain("rope_freqs.weight", values["global_head_dim"] // 2)]


# Nemotron-H: each layer is Mamba-2, attention, or experts without gates.


def _add_nemotron_h(writer: gguf.GGUFWriter, values: Values) -> None:
    kinds, inner = _kinds(values), values["moe_intermediate_size"]
    heads, width = values["mamba_num_heads"], values["mamba_head_dim"]
    keys = values["num_key_value_heads"]
    writer.add_head_count_kv([keys if kind == "full_attention" else 0 for kind in kinds])
    writer.add_key_length(values["head_dim"])
    writer.add_value_length(values["head_dim"])
    writer.add_feed_forward_length([inner if kind == "moe" else 0 for kind in kinds])
    writer.add_layer_norm_eps(1e-5)
    writer.add_rope_dimension_count(values["head_dim"])
    writer.add_ssm_conv_kernel(values["conv_kernel"])
    writer.add_ssm_state_size(values["ssm_state_size"])
    writer.add_ssm_group_count(values["n_groups"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * width)
    writer.add_expert_shared_feed_forward_length(values["moe_shared_expert_intermediate_size"])
    writer.add_expert_shared_count(values["n_shared_experts"])
    writer.add_expert_weights_norm(values["norm_topk_prob"])
    writer.add_expert_weights_scale(values["routed_scaling_factor"])


def _nemotron_h(values: Values, layer: int) -> Iterator[Matrix]:
    hidden, head, kind = values["hidden_size"], values["head_dim"], _kinds(values)[layer]
    yield _plain("attn_norm.weight", hidden)
    if kind == "moe":
        yield from _nemotron_experts(values)
    elif kind == "linear_attention":
        yield from _mamba2(values)
    else:
        queries = values["num_attention_heads"] * head
        yield from _attention(hidden, queries, values["num_key_value_heads"] * head)


def _mamba2(values: Values) -> Iterator[Matrix]:
    hidden, heads = values["hidden_size"], values["mamba_num_heads"]
    inner, groups = heads * values["mamba_head_dim"], values["n_groups"]
    mixed = inner + 2 * groups * values["ssm_state_size"]
    yield Matrix("ssm_in.weight", (inner + mixed + heads, hidden))
    yield _plain("ssm_conv1d.weight", mixed, values["conv_kernel"])
    yield _plain("ssm_conv1d.bias", mixed)
    yield _plain("ssm_dt.bias", heads)
    yield from (_plain("ssm_a", heads, 1), _plain("ssm_d", heads, 1))
    yield _plain("ssm_norm.weight", groups, inner // groups)
    yield Matrix("ssm_out.weight", (hidden, inner))


def _nemotron_experts(values: Values) -> Iterator[Matrix]:
    shared = values["moe_shared_expert_intermediate_size"]
    ungated = [*_experts(values), *_feed_forward(values["hidden_size"], shared, "_shexp")]
    gates = ("ffn_gate_exps.weight", "ffn_gate_shexp.weight")
    yield from (matrix for matrix in ungated if matrix.name not in gates)
    yield _plain("exp_probs_b.bias", _num_experts(values))


# By Transformers' name.
ARCHITECTURES = {
    "qwen3": Architecture("qwen3", _add_qwen3, _qwen3),
    "qwen3_moe": Architecture("qwen3moe", _add_qwen3, _qwen3),
    "qwen3_next": Architecture("qwen3next", _add_delta_net, _qwen3next),
    "qwen3_5_moe_text": Architecture("qwen35moe", _add_qwen35moe, _qwen35moe),
    "lfm2_moe": Architecture("lfm2moe", _add_lfm2moe, _lfm2moe, "token_embd_norm.weight"),
    "gemma4_text": Architecture("gemma4", _add_gemma4, _gemma4, shared=_gemma4_shared),
    "nemotron_h": Architecture("nemotron_h_moe", _add_nemotron_h, _nemotron_h),
}
