"""LongCat-Flash: some of a layer's experts have no weights and return their input."""

from torch import Tensor

from tandem.foreign_types import ModelPart, PreTrainedConfig
from tandem.hf.adapters.adapted_experts import AdaptedExperts


class LongcatFlashExperts(AdaptedExperts):
    """The experts of a layer: first experts with weights, then experts that return their input.

    The router chooses among both. The executor skips experts without weights, and `forward` adds
    their results.
    """

    def __init__(self, experts: ModelPart, config: PreTrainedConfig) -> None:
        """Take over the weights of Transformers' `LongcatFlashExperts`."""
        num_experts = experts.num_routed_experts
        gate_up = experts.gate_up_proj[:num_experts]  # the other experts' matrices are never read
        super().__init__(config, gate_up, experts.down_proj, experts.act_fn)
        self.num_experts = num_experts
        # Transformers creates matrices for these, too.
        self.num_spare_experts = experts.zero_expert_num

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the weighted sum of each token's experts: (n_tokens, hidden_size) in and out."""
        routed = super().forward(hidden_states, top_k_index, top_k_weights)
        share = (top_k_weights * (top_k_index >= self.num_experts)).sum(-1, keepdim=True)
        returned: Tensor = hidden_states * share
        return routed + returned.to(routed.dtype)
