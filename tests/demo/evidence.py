"""Measures a demo model: text beside the dense model's, and the routing of tokens."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from tandem.demo.routers import expert_shares
from tandem.foreign_types import PreTrainedModel


class LayerRouting(NamedTuple):
    """How one layer routed a text."""

    shares: list[float]
    """Each expert's share of all (token, expert) pairs."""
    neighbour_ratio: float
    """Experts shared by adjacent tokens, relative to those shared by shuffled tokens."""
    top_weights: list[float]
    """The weight of a token's first expert, at the quantiles `QUANTILES`."""


_BATCH = 5

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@torch.inference_mode()
def greedy_tokens(
    model: PreTrainedModel, prompts: list[list[int]], num_tokens: int
) -> list[list[int]]:
    """Return each prompt's next tokens by greedy decoding; continue after an end-of-text token."""
    answers: list[list[int]] = [[] for _ in prompts]
    # Prompts of similar length are grouped: little padding, and a fifth of the decode steps.
    by_length = sorted(range(len(prompts)), key=lambda idx: len(prompts[idx]))
    for start in range(0, len(prompts), _BATCH):
        batch = by_length[start : start + _BATCH]
        width = max(len(prompts[idx]) for idx in batch)
        padding = [width - len(prompts[idx]) for idx in batch]
        rows = [[0] * pad + prompts[idx] for pad, idx in zip(padding, batch, strict=True)]
        output = model.generate(
            torch.tensor(rows, device="cpu"),
            attention_mask=torch.tensor(
                [[0] * pad + [1] * (width - pad) for pad in padding], device="cpu"
            ),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
        )
        for idx, row in zip(batch, output[:, width:].tolist(), strict=True):
            answers[idx] = row
    return answers


@torch.inference_mode()
def perplexity(model: PreTrainedModel, windows: torch.Tensor) -> float:
    """Return the perplexity over ids (windows, tokens); each window starts without context."""
    losses = [
        F.cross_entropy(model(window[None]).logits[0, :-1].float(), window[1:])
        for window in windows
    ]
    return float(torch.stack(losses).mean().exp())


@torch.inference_mode()
def routing(model: PreTrainedModel, windows: torch.Tensor) -> list[LayerRouting]:
    """Return how each layer of a Mixtral model routes ids (windows, tokens)."""
    per_window = [model.model(w[None], output_router_logits=True).router_logits for w in windows]
    return [
        _layer_routing(torch.stack(logits).float(), model.config.num_experts_per_tok)
        for logits in zip(*per_window, strict=True)
    ]


def routing_table(layers: list[LayerRouting]) -> str:
    """Return the routing of all layers as text, one line per layer."""
    lines = ["layer  neighbours  top weight 5..95 %            share of each expert, %"]
    for idx, layer in enumerate(layers):
        weights = " ".join(f"{weight:.2f}" for weight in layer.top_weights)
        shares = " ".join(f"{100 * share:4.1f}" for share in layer.shares)
        lines.append(f"{idx:5}  {layer.neighbour_ratio:10.2f}  {weights:28}  {shares}")
    return "\n".join(lines)


def _layer_routing(logits: torch.Tensor, top_k: int) -> LayerRouting:
    num_experts = logits.shape[-1]  # logits: (windows, tokens, num_experts)
    values, chosen = logits.topk(top_k, dim=-1)
    weights = values.softmax(-1)[..., 0].flatten()
    used = F.one_hot(chosen, num_experts).sum(-2).float()  # (windows, tokens, num_experts)
    order = torch.randperm(
        weights.numel(), generator=torch.Generator().manual_seed(0), device="cpu"
    )
    shuffled = used.flatten(0, 1)[order].view_as(used)
    return LayerRouting(
        shares=expert_shares(logits.flatten(0, 1), top_k).tolist(),
        neighbour_ratio=float(_shared_experts(used) / _shared_experts(shuffled)),
        top_weights=weights.quantile(torch.tensor(QUANTILES, device="cpu")).tolist(),
    )


def _shared_experts(used: torch.Tensor) -> torch.Tensor:
    """Return the mean number of experts that a token shares with the next one."""
    return (used[:, 1:] * used[:, :-1]).sum(-1).mean()
