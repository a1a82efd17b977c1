"""Makes routers from a dense model: rows are spherical k-means centroids of real gate inputs.

A token is routed to the experts whose centroids are most similar to its hidden state. So tokens are
routed by meaning, without training.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from tandem.core.errors import BuildError
from tandem.demo.recipe import Progress, Recipe
from tandem.foreign_types import PreTrainedModel

_GAIN_STEP = 1.02
_MAX_GAIN_STEPS = 400


@torch.inference_mode()
def gate_inputs(
    model: PreTrainedModel, windows: torch.Tensor, progress: Progress
) -> list[torch.Tensor]:
    """Run the model on ids (windows, tokens); return each layer's FFN inputs.

    Each layer's inputs are (n, hidden_size) bfloat16.

    The first token of every window is left out, because it is an attention sink, and its hidden
    state resembles no other token's.
    """
    seen: list[list[torch.Tensor]] = [[] for _ in model.model.layers]

    def keep(layer: int) -> Callable[..., None]:
        return lambda module, args, output: seen[layer].append(output[0, 1:].bfloat16())

    hooks = [
        layer.post_attention_layernorm.register_forward_hook(keep(idx))
        for idx, layer in enumerate(model.model.layers)
    ]
    try:
        # One window at a time: batches need more memory and were not faster.
        for done, window in enumerate(windows):
            progress("calibrate", done, len(windows))
            model.model(window[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    progress("calibrate", len(windows), len(windows))
    return [torch.cat(parts) for parts in seen]


def cluster_router(
    inputs: torch.Tensor, recipe: Recipe, generator: torch.Generator
) -> torch.Tensor:
    """Return a router's weight (num_experts, hidden_size) for one layer's gate inputs."""
    inputs = inputs.float()
    centroids = _spherical_kmeans(F.normalize(inputs, dim=-1), recipe, generator)
    rows = _raise_weak_rows(inputs, centroids, recipe)
    top, second = (inputs @ rows.T).topk(2, dim=-1).values.unbind(-1)
    # The top-2 softmax gives the first expert sigmoid(gap), so this sets the median gap.
    target_gap = math.log(recipe.median_top_weight / (1 - recipe.median_top_weight))
    return rows * (target_gap / (top - second).median())


def expert_shares(logits: torch.Tensor, num_experts_per_tok: int) -> torch.Tensor:
    """Return each expert's share of all top-k choices, for router logits (n, num_experts)."""
    num_experts = logits.shape[-1]
    chosen = logits.topk(num_experts_per_tok, dim=-1).indices.flatten()
    return torch.bincount(chosen, minlength=num_experts) / chosen.numel()


def _spherical_kmeans(
    points: torch.Tensor, recipe: Recipe, generator: torch.Generator
) -> torch.Tensor:
    """Cluster unit vectors by cosine similarity, initialised as in k-means++; return centroids."""
    first = torch.randint(len(points), (1,), generator=generator, device="cpu")
    centroids = points[first]
    for _ in range(recipe.num_experts - 1):
        distance = (1 - (points @ centroids.T).amax(-1)).clamp_min(0)
        chosen = torch.multinomial(distance, 1, generator=generator)
        centroids = torch.cat([centroids, points[chosen]])
    for _ in range(recipe.kmeans_steps):
        nearest = (points @ centroids.T).argmax(-1)
        sums = torch.zeros_like(centroids).index_add_(0, nearest, points)
        centroids = F.normalize(sums, dim=-1)
    return centroids


def _raise_weak_rows(inputs: torch.Tensor, centroids: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Return the centroids, lengthened until each expert has `min_expert_share` of the choices.

    Hidden states share a common direction, so an expert with a longer row gets higher logits and
    more tokens. Raises `BuildError` if an expert still gets too few.
    """
    rows = centroids.clone()
    for _ in range(_MAX_GAIN_STEPS):
        shares = expert_shares(inputs @ rows.T, recipe.num_experts_per_tok)
        weak = shares < recipe.min_expert_share
        if not weak.any():
            return rows
        rows[weak] *= _GAIN_STEP
    raise BuildError(
        f"an expert gets {shares.min():.1%} of the calibration tokens; expected at least "
        f"{recipe.min_expert_share:.0%}; this recipe does not fit this dense model"
    )
