"""How well the next router predicts when it is asked ahead, with and without the residual.

python -m benchmarks.policy.look_ahead

DALI's tables 5 and 8 on the demo model, whose weights are trained, and on models with random
weights but the residual streams, norms and routers of their architectures: how often the experts of
highest predicted workload are among those of highest true workload, by batch size, and how like the
predicted router input was to the true one. Three quarters of the text teach, the rest is judged.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from importlib import resources
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

import tandem
from tandem.bench.calibration import BATCHES, accuracy_by_batch, calibrate
from tandem.cli.keeping import cache_dir

VOCABULARY = 4096
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
}


def random_configs() -> dict[str, PretrainedConfig]:
    """Return small configs of architectures that route in different ways."""
    return {
        "mixtral, 8 experts": MixtralConfig(
            **SIZES, intermediate_size=256, num_local_experts=8, num_experts_per_tok=2
        ),
        "qwen3_moe, 64 experts": Qwen3MoeConfig(
            **SIZES, head_dim=32, moe_intermediate_size=64, num_experts=64, num_experts_per_tok=8,
            norm_topk_prob=True, intermediate_size=256,
        ),
        "olmoe, 32 experts": OlmoeConfig(
            **SIZES, intermediate_size=64, num_experts=32, num_experts_per_tok=4
        ),
        "gpt_oss, 32 experts": GptOssConfig(
            **SIZES, head_dim=32, intermediate_size=64, num_local_experts=32,
            num_experts_per_tok=4, layer_types=["full_attention"] * 12,
        ),
        "deepseek_v3, 32 experts": DeepseekV3Config(
            **SIZES, intermediate_size=256, moe_intermediate_size=64, n_routed_experts=32,
            num_experts_per_tok=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1,
            topk_group=1, q_lora_rank=64, kv_lora_rank=32, qk_rope_head_dim=16,
            qk_nope_head_dim=16, v_head_dim=32,
        ),
    }  # fmt: skip


def text_ids(tokens: int) -> list[int]:
    """Return the first tokens of the text that comes with Tandem, by the demo model's tokenizer."""
    text = resources.files("tandem.demo").joinpath("calibration.txt").read_text(encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(cache_dir() / "models" / "demo")
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids[:tokens]


def demo_model() -> Any:
    """Return the demo model, which must have been built."""
    return tandem.load(cache_dir() / "models" / "demo", dtype="float32")


def random_model(config: PretrainedConfig, scale: float) -> Any:
    """Return a model with weights of `scale` times the usual size, loaded through Tandem."""
    torch.manual_seed(0)
    config.initializer_range *= scale
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return tandem.load(folder, dtype="float32")


def judged(model: Any, ids: list[int]) -> dict[str, Any]:
    """Calibrate on the text and return the accuracies and the cosines."""
    found = calibrate(model, ids)
    plain, residual = found.likeness
    return {
        "top_k": found.judged.meta.top_k,
        "accuracy": accuracy_by_batch(found.judged, found.judged.meta.top_k),
        "cosine": {"gate": sum(plain) / len(plain), "residual": sum(residual) / len(residual)},
    }


def rows_of(name: str, found: dict[str, Any]) -> Iterator[str]:
    """Yield a model's lines of the table."""
    for source in ("gate", "residual"):
        values = " | ".join(f"{100 * value:.1f}" for value in found["accuracy"][source])
        yield f"| {name} | {source} | {values} | {found['cosine'][source]:.3f} |"


def main() -> int:
    """Judge every model; print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="of the text, for the demo model")
    parser.add_argument("--random-tokens", type=int, default=8192, help="for the random models")
    parser.add_argument("--scale", type=float, default=3.0, help="of random weights")
    flags = parser.parse_args()
    ids = text_ids(max(flags.tokens, flags.random_tokens))
    report: dict[str, Any] = {}
    header = " | ".join(f"batch {batch}" for batch in BATCHES)
    print(
        f"| model | asked with | {header} | cosine |", "|---" * (3 + len(BATCHES)) + "|", sep="\n"
    )
    for name, config in [("demo", None), *random_configs().items()]:
        if config is None:
            model, count, known = demo_model(), flags.tokens, max(ids) + 1
        else:
            model, count, known = random_model(config, flags.scale), flags.random_tokens, VOCABULARY
        title = name if config is None else f"random {name}"
        report[title] = judged(model, [token % known for token in ids[:count]])
        print(*rows_of(title, report[title]), sep="\n", flush=True)
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
