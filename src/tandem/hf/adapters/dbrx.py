"""DBRX: a tensor stacks the rows of one matrix (w1, v1 or w2) of all experts."""

import torch
from torch import Tensor, nn

from tandem.foreign_types import ModelPart, PreTrainedConfig
from tandem.hf.adapters.adapted_experts import AdaptedExperts, StackedRows


class DbrxExperts(nn.Module):
    """The experts of a layer; replaces Transformers' module, which computes them in a loop."""

    STACKED = (
        StackedRows(("experts.mlp.w1", "experts.mlp.v1"), "experts.mlp.gate_up_proj"),
        StackedRows(("experts.mlp.w2",), "experts.mlp.down_proj", are_transposed=True),
    )

    def __init__(self, experts: ModelPart, config: PreTrainedConfig) -> None:
        """Take over the weights of Transformers' `DbrxExperts`."""
        super().__init__()
        own = experts.mlp
        gate, up, down = (
            weight.unflatten(0, (experts.num_experts, -1)) for weight in (own.w1, own.v1, own.w2)
        )
        self.mlp = AdaptedExperts(
            config, torch.cat([gate, up], dim=1), down.transpose(1, 2), own.activation_fn
        )

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the weighted sum of each token's experts: (..., hidden_size) in and out."""
        hidden = hidden_states.flatten(0, -2)
        out: Tensor = self.mlp(hidden, top_k_index, top_k_weights)
        return out.view(hidden_states.shape)
