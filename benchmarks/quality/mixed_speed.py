"""Decode speed of a mixed recipe over that of one format of as many bytes, in turns.

    python -m benchmarks.quality.mixed_speed
    python -m benchmarks.quality.mixed_speed --uniform q3_k    # below 4 bits: a recipe with grids

A model of random weights with experts of Qwen3-30B-A3B's sizes (four layers, 32 experts, 8 per
token), so that experts' bytes dominate. Speeds are compared per byte of the whole model.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks.quality.curve import packed_bytes
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

import tandem
from tandem.bench.generation import Workload, measure
from tandem.cli.keeping import cache_dir
from tandem.generate.generator import Generator
from tandem.hf.checkpoint import open_model
from tandem.hf.config import OffloadConfig
from tandem.hf.runtime import require_runtime
from tandem.quality.recipe import measure_parts


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uniform", default="iq4_nl")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=64)
    options = parser.parse_args()
    disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
        path = Path(folder)
        random_model(options.layers, num_experts=32).save_pretrained(path)
        kind = options.uniform
        uniform: dict[str, Any] = {
            "expert_dtype": kind, "dense_dtype": kind, "dense_formats": {"model.embed_tokens": kind}
        }  # fmt: skip
        models: dict[str, Any] = {"uniform": tandem.load(path, **uniform)}
        size = packed_bytes(models["uniform"])
        measured = measure_parts(open_model(path, may_run_code=False), OffloadConfig())
        recipe = measured.recipe(size)
        print("\n".join(recipe.lines()))
        options_of_recipe: dict[str, Any] = recipe.options()
        models["recipe"] = tandem.load(path, **options_of_recipe)
        print(json.dumps(_compare(models, options.rounds, options.steps)))


def random_model(num_layers: int, num_experts: int) -> Qwen3MoeForCausalLM:
    """Return random weights of Qwen3-30B-A3B's sizes, with a smaller vocabulary."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=2048, num_hidden_layers=num_layers, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=num_experts, num_experts_per_tok=8,
        moe_intermediate_size=768, intermediate_size=768, norm_topk_prob=True,
        max_position_embeddings=2048, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3MoeForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model


def _compare(models: dict[str, Any], rounds: int, steps: int) -> dict[str, object]:
    work = Workload(prompt_tokens=16, new_tokens=steps)
    made = {n: Generator(m, threads=require_runtime(m).threads) for n, m in models.items()}
    speeds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            speed = measure(model, made[name], work).speed
            speeds[name].append(speed.decode_tokens_per_second)
    sizes = {name: packed_bytes(model) for name, model in models.items()}
    by_byte = {name: median(each) * sizes[name] for name, each in speeds.items()}
    return {
        "tokens_per_second": {name: median(each) for name, each in speeds.items()},
        "bytes": sizes,
        "recipe_over_uniform": by_byte["recipe"] / by_byte["uniform"],
    }


if __name__ == "__main__":
    main()
