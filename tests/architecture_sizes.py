"""Small sizes for the keys of configurations, and what single kinds of models need besides."""

from typing import Any

VOCABULARY = 128
FIRST_PLAIN_TOKEN = 32  # ids below are for the special tokens of SIZES
PROMPT_LENGTH = 7
MAX_LAYERS = 4
EXPERTS = 8
TOP_K = 2

# The values of configuration keys, wherever they occur. Widths that reach expert weights
# are multiples of 32, the group of the quantised formats.
SIZES: dict[str, Any] = {
    # text
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "swa_num_attention_heads": 4,
    "num_attention_heads_per_layer": 4,
    "head_dim": 16,
    "swa_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "sliding_window": 4,  # shorter than the prompt, so that the window matters
    "sliding_window_size": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "logit_scale": 1.0,  # a head that shrinks its logits would hide differences
    "logits_mup_width_multiplier": 1.0,
    "output_multiplier": 1.0,
    "qk_scale_factor": 1.0,  # sharp attention would magnify rounding
    # feed-forward and experts
    "intermediate_size": 64,
    "dense_intermediate_size": 64,
    "prefix_dense_intermediate_size": 64,
    "moe_intermediate_size": 32,
    "moe_hidden_size": 32,
    "moe_latent_size": 32,
    "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "router_hidden_size": 16,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_experts_per_token": TOP_K,
    "top_k_experts": TOP_K,
    "moe_topk": TOP_K,
    "moe_k": TOP_K,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "enable_moe_block": True,
    "swiglu_limit": 0.5,  # low enough to be reached
    "mlp_gate_softcap": 0.5,
    "mlp_up_softcap": 0.5,
    # which layers hold experts, where a rule says it and not a list
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": MAX_LAYERS - 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    # latent and indexed attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 16,  # few heads would often give several tokens the score zero
    "index_topk": 4,
    "index_kpool": 2,
    "index_block_size": 2,
    "index_topk_blocks": 2,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "rotary_dim": 8,
    # linear attention and state spaces
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_chunk_size": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_dt_rank": 8,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 4,
    "block_size": 4,
    # hyper-connections, gated norms, n-gram embeddings, diffusion
    "hc_lowrank": 16,
    "gated_norm_rank": 8,
    "ngram_vocab_size_base": 64,
    "ple_embed_dim": 32,
    "split_ngram_parts": 4,
    "canvas_length": 8,
    # layers that are passed again
    "n_layers_per_attn_res_block": 1,
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 3,
    "loop_num_passes": 2,  # more would magnify rounding
    "loop_gate_rank": 8,
    # towers for images and sound: present, never run
    "num_heads": 4,
    "image_size": 64,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "deepstack_visual_indexes": 0,
    "projection_intermediate_size": 32,
    "projector_hidden_size": 32,
    "mlp_dim": 64,
    "output_channels": 16,
    "downsample_channels": 16,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "d_model": 64,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "downsample_hidden_size": 16,
    "output_dim": 64,
    "num_mel_bins": 16,
    "feature_size": 16,
    "hidden_sizes": 16,
    "depths": 1,
    "depth": 1,
}

_VISION = ("hidden_size", "intermediate_size", "num_attention_heads", "position_embedding_size")
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}

# What one kind of configuration needs besides, by model_type.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    # The default layers are of one kind, or stated nowhere; released models have these.
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_n_heads": 2,  # one for each KV head
    },
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    # The sections of the rotary embedding must add up to half of the rotated width.
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]},
        "moe_intermediate_size": [64, 32],  # experts for text, experts for images
    },
    "glm4v_moe_text": {
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    },
    "hy_v4_vl_text": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
    # Transformers 5.17 has no default for a tower that the model does not go without.
    "diffusion_gemma": {
        "vision_config": {
            **{key: SIZES[key] for key in _VISION},
            "model_type": "gemma4_vision",
            "num_hidden_layers": 1,
            "num_key_value_heads": SIZES["num_attention_heads"],
        }
    },
    # Sizes of some layers that are not keys of their own.
    "diffusion_gemma_text": {"global_head_dim": 16},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 24},
    "gemma4_text": {"global_head_dim": 16},
    "qwen4_exp_text": {"ple_layer_ids": [1, 3]},  # embeddings of n-grams, as the released model
    # The configuration class refuses anything else.
    "glm5_next_text": {"qk_rope_head_dim": 0, "head_dim": 0},
    "zaya": {"num_experts_per_tok": 1},
    "dbrx": {
        "n_heads": 4,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10_000.0},
        "ffn_config": {
            "hidden_size": 64,
            "ffn_hidden_size": 32,
            "moe_num_experts": EXPERTS,
            "moe_top_k": TOP_K,
        },
    },
    # Two chunks of a prompt, and temperatures that grow within it.
    "llama4_text": {
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 64,
        "attention_chunk_size": 4,
        "floor_scale": 4,
        "attn_scale": 0.5,
    },
    "longcat_flash": {
        "num_layers": 2,  # with two attentions each
        "head_dim": 8,
        "expert_ffn_hidden_size": 32,
        "ffn_hidden_size": 64,
        "zero_expert_num": 4,
        "routed_scaling_factor": 1.5,
    },
    "step3p5": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "swiglu_limits": [None, None, 0.3, 0.3],
        "swiglu_limits_shared": [None, None, None, 0.3],
        "share_expert_dim": 32,
        "num_sliding_attention_heads": 8,
        "moe_router_scaling_factor": 1.5,
        "rope_parameters": {
            "full_attention": {**_ROPE, "partial_rotary_factor": 0.5},
            "sliding_attention": _ROPE,
        },
    },
    "llama4_vision_model": dict.fromkeys(
        ("vision_output_dim", "projector_input_dim", "projector_output_dim"), 64
    ),
}
