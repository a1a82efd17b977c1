"""Up-cycles a dense Llama model into a Mixtral checkpoint by a recipe, and writes the files."""

from collections.abc import Iterator
from pathlib import Path

import torch

from tandem.core.errors import BuildError
from tandem.demo.checkpoint import ROUTER, ShardWriter, generation_config, mixtral_config
from tandem.demo.dense import Dense
from tandem.demo.recipe import Progress, Recipe
from tandem.demo.routers import cluster_router, gate_inputs
from tandem.foreign_types import ModelPart

CALIBRATION = Path(__file__).with_name("calibration.txt")

_CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# {kind}: SmolLM2-135M-Instruct up-cycled to {experts} experts

Built by Tandem (recipe {version}) from the Q4_1 GGUF of SmolLM2-135M-Instruct (Hugging Face,
Apache-2.0). Changed: each FFN is {experts} experts, {top_k} per token, with routers clustered from
hidden states; {difference}. Weights are bfloat16. A model for trying and testing, not for use.
"""


@torch.no_grad()
def build_checkpoint(
    dense: Dense,
    directory: Path,
    *,
    kind: str,
    recipe: Recipe,
    progress: Progress,
    routers: list[torch.Tensor] | None = None,
) -> None:
    """Write the checkpoint of one of `DEMO_KINDS` into an empty directory.

    Both demo models have the same routers: pass the other model's `routers`, if it is built, to
    avoid computing them again.
    """
    if routers is None:
        routers = _make_routers(dense, recipe, progress)
    generator = torch.Generator().manual_seed(recipe.seed)
    writer = ShardWriter(directory, recipe.shard_bytes)
    body = dense.model.model
    writer.add("model.embed_tokens.weight", body.embed_tokens.weight)
    for idx, (layer, router) in enumerate(zip(body.layers, routers, strict=True)):
        progress("write", idx, len(routers))
        for name, tensor in _layer_tensors(layer, router, kind, recipe, generator):
            writer.add(f"model.layers.{idx}.{name}", tensor)
    writer.add("model.norm.weight", body.norm.weight)
    if not dense.model.config.tie_word_embeddings:
        writer.add("lm_head.weight", dense.model.lm_head.weight)
    writer.finish()
    _write_descriptions(dense, directory, kind, recipe)
    progress("write", len(routers), len(routers))


def _make_routers(dense: Dense, recipe: Recipe, progress: Progress) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(recipe.seed)
    text = CALIBRATION.read_text(encoding="utf-8")
    ids = dense.tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    if len(ids) < recipe.calibration_tokens:
        raise BuildError(
            f"{CALIBRATION.name} has {len(ids)} tokens; expected at least "
            f"{recipe.calibration_tokens}; use the tokenizer of SmolLM2 or lower calibration_tokens"
        )
    windows = ids[: recipe.calibration_tokens].view(-1, recipe.window_tokens)
    inputs = gate_inputs(dense.model, windows, progress)
    routers = []
    for layer in range(len(inputs)):
        progress("cluster", layer, len(inputs))
        routers.append(cluster_router(inputs[layer], recipe, generator))
    progress("cluster", len(inputs), len(inputs))
    return routers


def _layer_tensors(
    layer: ModelPart, router: torch.Tensor, kind: str, recipe: Recipe, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of one up-cycled layer, with the names of published Mixtral models."""
    for name, tensor in layer.named_parameters():
        if not name.startswith("mlp."):
            yield name, tensor
    yield ROUTER, router
    dense = {"w1": layer.mlp.gate_proj, "w2": layer.mlp.down_proj, "w3": layer.mlp.up_proj}
    for expert in range(recipe.num_experts):
        for name, linear in dense.items():
            weight = linear.weight
            if kind == "demo":
                weight = weight + _difference(weight, recipe, generator)
            yield f"block_sparse_moe.experts.{expert}.{name}.weight", weight


def _difference(weight: torch.Tensor, recipe: Recipe, generator: torch.Generator) -> torch.Tensor:
    """Return a random low-rank matrix; its norm is the recipe's share of the weight's norm."""
    rows, columns = weight.shape
    left = torch.randn(rows, recipe.difference_rank, generator=generator, device="cpu")
    right = torch.randn(recipe.difference_rank, columns, generator=generator, device="cpu")
    product = left @ right
    product *= recipe.difference_norm * weight.norm() / product.norm()
    return product


def _write_descriptions(dense: Dense, directory: Path, kind: str, recipe: Recipe) -> None:
    mixtral_config(dense.model.config, recipe).save_pretrained(directory)
    generation_config(dense.model.config).save_pretrained(directory)
    dense.tokenizer.save_pretrained(directory)
    difference = (
        f"each expert has a random rank-{recipe.difference_rank} difference of "
        f"{recipe.difference_norm:.0%}"
        if kind == "demo"
        else "all experts of a layer are equal"
    )
    card = _CARD.format(
        kind=kind,
        experts=recipe.num_experts,
        top_k=recipe.num_experts_per_tok,
        version=recipe.version,
        difference=difference,
    )
    (directory / "README.md").write_text(card, encoding="utf-8")
