"""Inkling's router, computed by other operations that Tandem has natively; the result is equal."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.decode.substitutions.substitution import Substitution, has
from tandem.foreign_types import ModelPart


def _route_with_shared(
    self: ModelPart, hidden_states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return all experts' logits, the chosen experts' weights and ids, the shared experts' weights.

    A softmax over logarithms of sigmoids, -softplus(-x), divides the weight among the chosen and
    the shared experts.
    """
    logits = F.linear(hidden_states.reshape(-1, self.hidden_dim).float(), self.weight.float())
    routed, shared = logits.split([self.num_experts, self.n_shared_experts], dim=-1)
    ranked = routed.sigmoid() + self.e_score_correction_bias.float()
    chosen = torch.topk(ranked, self.top_k, dim=-1, sorted=False)[1]
    both = torch.cat([routed.gather(-1, chosen), shared], dim=-1)
    weights = (-F.softplus(-both)).softmax(dim=-1) * self.route_scale * self.global_scale.float()
    weights = weights.to(hidden_states.dtype)
    of_chosen, of_shared = weights.split([self.top_k, self.n_shared_experts], dim=-1)
    return routed, of_chosen.contiguous(), chosen, of_shared.contiguous()


WITH_SHARED = Substitution(
    has("n_shared_experts", "route_scale", "global_scale", "e_score_correction_bias", "top_k"),
    _route_with_shared,
)
