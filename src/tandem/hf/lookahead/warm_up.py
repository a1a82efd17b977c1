"""One tiny forward pass, which shows values that configs name in many ways, or not at all.

It records how the experts modules are called: dtype, width, and number of experts per token.
Nothing here lists architectures.
"""

import dataclasses
import time

import torch
from torch import Tensor

from tandem.experts.execution.batch import ExpertFunctions, RoutedCall
from tandem.experts.execution.executor import Executor
from tandem.experts.execution.passing_executor import PassingExecutor
from tandem.foreign_types import PreTrainedModel
from tandem.hf.compat import takes_logits_to_keep

WARM_UP_TOKENS = 4


@dataclasses.dataclass(slots=True)
class ExpertsCall:
    """How one experts module was called."""

    layer: int
    top_k: int
    hidden_size: int
    dtype: torch.dtype
    top_k_index: Tensor  # (n_tokens, top_k)
    hidden: Tensor  # (n_tokens, hidden_size)


class Observer(PassingExecutor):
    """An executor that records its calls and passes them to the executor that it wraps."""

    def __init__(self, inner: Executor) -> None:
        """Wrap `inner`."""
        super().__init__(inner)
        self.calls: list[ExpertsCall] = []

    def after(self, call: RoutedCall) -> None:
        """Record a call."""
        hidden, index = call.hidden, call.top_k_index
        self.calls.append(
            ExpertsCall(
                call.layer,
                index.shape[1],
                hidden.shape[1],
                hidden.dtype,
                index.detach().clone(),
                hidden.detach().clone(),
            )
        )


class NoExperts(Executor):
    """An executor that computes nothing, for timing everything else."""

    def compute(self, call: RoutedCall, functions: ExpertFunctions) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(call.hidden)


def warm_up_ids(model: PreTrainedModel, num_tokens: int, *, first: int = 11) -> Tensor:
    """Return the token ids (num_tokens,) of a warm-up prompt, on the model's device."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    # Ordinary ids: multimodal models place those of images at either end of the vocabulary.
    ids = (torch.arange(num_tokens, device="cpu") * 7 + first) % max(1, vocabulary // 2)
    there: Tensor = ids.to(model.device)
    return there


def forward_tokens(
    model: PreTrainedModel, num_tokens: int, *, num_logits: int | None = None
) -> float:
    """Run a prompt of `num_tokens`; returns the seconds that it took.

    With `num_logits` only the last tokens' logits are computed, if the model supports that.
    """
    ids = warm_up_ids(model, num_tokens)
    can_leave_out = num_logits is not None and takes_logits_to_keep(model)
    begin = time.perf_counter()
    with torch.no_grad():
        model(input_ids=ids[None], **({"logits_to_keep": num_logits} if can_leave_out else {}))
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - begin
