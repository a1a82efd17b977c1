"""Finds routers that are a product and the largest of it, as a captured step can ask them.

What a router does beside (a softmax, weights) matters as little as its name: it is one of these if
it chooses what the product chooses, for states drawn at random.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.hf.lookahead.routers import Router

_NUM_STATES = 64
_LARGE = 8.0  # some states are so much larger: what is no product shows there
# Of the choices: near ties fall otherwise in 16 bits.
_LEAST_EQUAL = 0.98


class LinearRouter(NamedTuple):
    """Chooses the largest of weight (experts, hidden_size) times a state, plus bias (experts,)."""

    weight: Tensor
    bias: Tensor | None


@torch.no_grad()
def linear_router(router: Router) -> LinearRouter | None:
    """Return a router's product; None where it chooses otherwise, or reads more than a state."""
    if router.reads_tokens:
        return None
    parameters = [*router.module.parameters()]
    weights = [p for p in parameters if p.dim() == 2 and p.shape[1] == router.hidden_size]
    if not weights:
        return None
    states = _states(router.hidden_size, weights[0])
    choice = router.choose(states)
    for weight in weights:
        biases = [p for p in parameters if p.shape == weight.shape[:1]]
        for bias in (None, *biases):
            logits = F.linear(states.float(), weight.float())
            logits = logits if bias is None else logits + bias.float()
            if choice.shape[-1] <= len(weight) and _is_like(logits, choice):
                return LinearRouter(weight, bias)
    return None


def _states(hidden_size: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(_NUM_STATES, hidden_size, generator=generator, device="cpu")
    states[::2] *= _LARGE
    return states.to(like.device, like.dtype)


def _is_like(logits: Tensor, choice: Tensor) -> bool:
    largest = logits.topk(choice.shape[-1]).indices
    is_there = (choice[:, :, None] == largest[:, None, :]).any(-1)
    return float(is_there.float().mean()) >= _LEAST_EQUAL


def linear_routers(routers: Sequence[Router]) -> list[LinearRouter] | None:
    """Return the products of all of these; None unless each is one."""
    found = [linear_router(router) for router in routers]
    linear = [router for router in found if router is not None]
    return linear if len(linear) == len(found) else None
