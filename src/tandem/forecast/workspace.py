"""Forecasts the host memory of a prompt's activations, from a model's sizes."""

import torch

from tandem.checkpoint.config_values import value_of
from tandem.experts.measuring.profiler import EXPERTS_AT_ONCE, TOKEN_COUNTS
from tandem.forecast.sizes import ModelSizes
from tandem.foreign_types import PreTrainedConfig
from tandem.hf.steps import MAX_STEP_TOKENS


def workspace_bytes(sizes: ModelSizes, num_tokens: int, *, is_measured: bool = False) -> int:
    """Return the host memory that a prompt's activations take at most.

    If the experts have been measured for a device (`is_measured`), the kernels hold the memory of
    the largest batch that was measured.
    The coefficients were fitted to seven shapes; `python -m benchmarks.plan` compares plans with
    runs.
    """
    config = sizes.config
    hidden, inner = int(config.hidden_size), _number(config, "intermediate_size")
    of_experts = _number(config, "moe_intermediate_size") or inner
    of_heads = max(map(_heads_width, value_of(config, "per_layer_config") or [config]))
    num_tokens = min(MAX_STEP_TOKENS, num_tokens)
    num_routed = num_tokens * sizes.top_k
    if is_measured and sizes.top_k:
        num_routed = max(num_routed, EXPERTS_AT_ONCE * TOKEN_COUNTS[-1])
    # The routed tokens' fp32 results, and the codes of their inputs and of the values between the
    # projections.
    routed = num_routed * (5.25 * hidden + 1.2 * of_experts)
    # Six times the hidden states; queries and attention's results, or a mixer's values; dense
    # layers.
    mixed = max(12 * of_heads, sizes.mixer_token_bytes)
    # On the CPU, models from GGUF files compute in fp32.
    if value_of(config, "dtype") == torch.float32:
        mixed *= 2
    has_dense_layers = sizes.num_moe_layers < sizes.num_layers
    dense = (8 if has_dense_layers else 4) * inner if of_experts != inner else 0
    return int(routed + num_tokens * (24 * hidden + mixed + dense))


def tower_bytes(vision: PreTrainedConfig | None, image_tokens: int) -> int:
    """Return the most bytes of a vision tower's activations; 0 without images.

    Coefficients were fitted to Qwen3.5's tower: 62 kB a patch at 4,096 patches, 51 kB at 9,216.
    """
    if vision is None or not image_tokens:
        return 0
    hidden, inner = _number(vision, "hidden_size"), _number(vision, "intermediate_size")
    side = _number(vision, "spatial_merge_size") or _number(vision, "pooling_kernel_size") or 1
    return image_tokens * side**2 * 2 * (16 * hidden + 3 * inner)


def embedded_bytes(config: PreTrainedConfig, num_tokens: int) -> int:
    """Return the most bytes of embeddings in prompts with images, which are embedded as a whole.

    These are the embeddings, a copy with the images' in it, and where these belong, of `num_tokens`
    tokens; one step's are among `workspace_bytes`.
    """
    return max(0, num_tokens - MAX_STEP_TOKENS) * 8 * int(config.hidden_size)


def _number(config: PreTrainedConfig, name: str) -> int:
    return int(value_of(config, name) or 0)


def _heads_width(config: PreTrainedConfig) -> int:
    """Return the number of values in a layer's queries per token."""
    heads = _number(config, "num_attention_heads")
    latent = _number(config, "qk_nope_head_dim") + _number(config, "qk_rope_head_dim")
    widths = [latent, *(_number(config, name) for name in ("head_dim", "global_head_dim"))]
    return heads * (max(widths) or int(config.hidden_size) // max(1, heads))
