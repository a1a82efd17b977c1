"""Experts that a model computes in its own code, as a module of Transformers' experts interface."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from tandem.foreign_types import PreTrainedConfig
from tandem.hf.experts import experts_forward


class StackedRows(NamedTuple):
    """Checkpoint tensors in which the rows of all experts are stacked."""

    sources: tuple[str, ...]
    """Suffixes of the tensors' names; an expert's rows of all these tensors are concatenated."""
    target: str
    """The suffix of the resulting parameter's name."""
    are_transposed: bool = False
    """Whether an expert's rows in the sources are the columns of its matrix in the target."""


class AdaptedExperts(nn.Module):
    """Gated experts with tensors of a model's own module, under the experts interface's names.

    The tensors are neither copied nor transposed. Only Tandem can compute them: a call before an
    executor is bound raises `ConfigError`.
    """

    has_gate, has_bias, has_post_expert_norm = True, False, False
    is_concatenated = True

    def __init__(
        self,
        config: PreTrainedConfig,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        act_fn: Callable[[Tensor], Tensor],
        *,
        is_transposed: bool = False,
    ) -> None:
        """Hold the experts' tensors.

        `gate_up_proj` is (num_experts, 2 * width, hidden_size), `down_proj` is (num_experts,
        hidden_size, width). If `is_transposed`, the last two dimensions are swapped.
        """
        super().__init__()
        self.config, self.act_fn, self.is_transposed = config, act_fn, is_transposed
        self.num_experts = len(down_proj)
        self.gate_up_proj = nn.Parameter(gate_up_proj, requires_grad=False)
        self.down_proj = nn.Parameter(down_proj, requires_grad=False)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the weighted sum of each token's experts: (n_tokens, hidden_size) in and out."""
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)

    def _apply_gate(self, rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return self.act_fn(gate) * up
