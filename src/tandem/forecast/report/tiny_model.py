"""A tiny model with random weights as a checkpoint on the disk, to be loaded as any other."""

from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM

VOCABULARY = 256
# Larger than Transformers' own, so that the most likely token leads clearly.
_WEIGHT_SPREAD = 0.1


def save_tiny_model(directory: Path) -> Path:
    """Write a checkpoint of two layers with eight experts each, in fp32; always the same."""
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
        max_position_embeddings=512, initializer_range=_WEIGHT_SPREAD,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MixtralForCausalLM(config)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    return directory
