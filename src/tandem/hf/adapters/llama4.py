"""Llama 4: an expert's input is the hidden state times its score; its output has weight 1."""

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from tandem.core.errors import UnsupportedModelError
from tandem.foreign_types import ModelPart, PreTrainedConfig
from tandem.hf.adapters.adapted_experts import AdaptedExperts


def with_image_outputs(model: ModelPart, config: PreTrainedConfig) -> ModelPart:
    """Add the field `image_outputs` to a text model's outputs; return the model.

    The model with a tower reads this field, which Transformers 5.24 does not set, so that its
    forward would fail.
    """

    def add(module: nn.Module, args: object, outputs: object) -> None:
        if isinstance(outputs, ModelOutput) and not hasattr(outputs, "image_outputs"):
            outputs.image_outputs = None

    model.register_forward_hook(add)
    return model


class Llama4Router(nn.Linear):
    """Returns each token's expert, and the score by which the expert's input is multiplied."""

    def __init__(self, router: ModelPart) -> None:
        """Take over a router's weights; `UnsupportedModelError` unless its top k is 1."""
        super().__init__(router.in_features, router.out_features, bias=False, device="meta")
        if router.top_k != 1:
            raise UnsupportedModelError(
                f"this Llama 4 sends a token to {router.top_k} experts, each with an input of its "
                "own; Tandem knows the released models, which have num_experts_per_tok = 1"
            )
        self.weight = router.weight

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Return logits (n_tokens, num_experts); score and expert of each token, (n_tokens, 1)."""
        logits = super().forward(hidden)
        score, expert = torch.topk(logits, 1, dim=-1)
        return logits, torch.sigmoid(score.float()).to(logits.dtype), expert


class Llama4Moe(nn.Module):
    """The experts block of a layer: router, routed experts and shared expert."""

    SEPARATE = "feed_forward.experts"  # quantised checkpoints keep experts here, one by one

    def __init__(self, block: ModelPart, config: PreTrainedConfig) -> None:
        """Take over the parts of Transformers' `Llama4TextMoe`."""
        super().__init__()
        self.router = Llama4Router(block.router)
        own = block.experts
        self.experts = AdaptedExperts(
            config, own.gate_up_proj, own.down_proj, own.act_fn, is_transposed=True
        )
        self.shared_expert = block.shared_expert

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the block's output (n_tokens, hidden_size), and logits (n_tokens, num_experts).

        `hidden_states` is (..., hidden_size).
        """
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits, score, expert = self.router(hidden)
        routed = self.experts(hidden * score, expert, torch.ones_like(score))
        return self.shared_expert(hidden) + routed, logits
