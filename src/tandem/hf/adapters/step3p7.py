"""Step-3.7: the last layers' experts clamp the activation's output, not its input."""

from torch import Tensor

from tandem.foreign_types import ModelPart, PreTrainedConfig
from tandem.hf.adapters.adapted_experts import AdaptedExperts


class Step3p7Experts(AdaptedExperts):
    """The experts of a layer; expert ids beyond the last are the router's padding, and skipped."""

    def __init__(self, experts: ModelPart, config: PreTrainedConfig) -> None:
        """Take over the weights of Transformers' `Step3p7Experts`."""
        super().__init__(config, experts.gate_up_proj, experts.down_proj, experts.act_fn)
        self.limit = experts.limit  # infinite in most layers

    def _apply_gate(self, rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return self.act_fn(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)
