"""A tiny random Llama through the real recipe; as a program, one build that can be interrupted.

python -m tests.demo.tiny MODELS [--stop-at STAGE]
"""

import argparse
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tandem.demo.build import build_checkpoint
from tandem.demo.dense import Dense
from tandem.demo.recipe import Recipe, ignore_progress
from tandem.demo.store import ensure_built

TINY = Recipe(
    calibration_tokens=4096,
    window_tokens=256,
    # Random hidden states cluster unevenly.
    min_expert_share=0.02,
    shard_bytes=200_000,
)


def tiny_dense() -> Dense:
    """Return a random two-layer Llama that reads bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    config = LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return Dense(model, tokenizer)


def build_tiny(models_dir: Path, stop_at: str | None = None, kind: str = "demo-equal") -> Path:
    """Build into `models_dir`; report the first time a stage begins, and wait to be killed."""

    def watch(stage: str, done: int, total: int) -> None:
        if stage == stop_at and done > 0:
            print(f"at {stage}", flush=True)
            time.sleep(600)

    def build(directory: Path) -> None:
        print("building", flush=True)
        build_checkpoint(tiny_dense(), directory, kind=kind, recipe=TINY, progress=watch)

    return ensure_built(models_dir, kind=kind, recipe=TINY, build=build, progress=ignore_progress)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", type=Path)
    parser.add_argument("--stop-at")
    args = parser.parse_args()
    build_tiny(args.models, args.stop_at)


if __name__ == "__main__":
    main()
