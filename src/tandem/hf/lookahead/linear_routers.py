"""Finds routers that a captured step can run ahead: they choose the largest values of a product.

The product is that of a matrix and the state; a monotonic function of it and a bias may follow. A
router qualifies if it chooses for random states what the product chooses, whatever else it does,
such as a softmax.
Routers that choose by token id alone need not be run ahead.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.experts.execution.look_ahead_routers import SCORINGS
from tandem.hf.lookahead.routers import Router
from tandem.hf.token_tables import is_by_token

_NUM_STATES = 64
_LARGE = 8.0  # some states are this much larger, which shows routers that are not linear
# Share of equal choices. In 16 bits, near ties may be decided differently.
_LEAST_EQUAL = 0.98


class LinearRouter(NamedTuple):
    """Chooses the largest values of weight (experts, hidden_size) @ state + bias (experts,).

    The function of `SCORINGS` that `scoring` names, if any, is applied to the product before the
    bias is added.
    """

    weight: Tensor
    bias: Tensor | None
    scoring: str = ""


@torch.no_grad()
def linear_router(router: Router) -> LinearRouter | None:
    """Return a router as a product; None if it chooses otherwise, or also reads token ids."""
    if router.reads_tokens:
        return None
    tensors = [*router.module.parameters(), *router.module.buffers()]
    weights = [p for p in tensors if p.dim() == 2 and p.shape[1] == router.hidden_size]
    if not weights:
        return None
    states = _states(router.hidden_size, weights[0])
    choice = router.choose(states)
    for weight in weights:
        if choice.shape[-1] > len(weight):
            continue
        logits = F.linear(states.float(), weight.float())
        biases = [p for p in tensors if p.shape == weight.shape[:1]]
        kinds = itertools.product(biases, SCORINGS)
        for bias, scoring in ((None, ""), *kinds):
            scores = scored(logits, scoring)
            if _is_like(scores if bias is None else scores + bias.float(), choice):
                return LinearRouter(weight, bias, scoring)
    return None


def scored(logits: Tensor, scoring: str) -> Tensor:
    """Return products after the function of `SCORINGS` that `scoring` names; "" is none."""
    if scoring == "sigmoid":
        return logits.sigmoid()
    return F.softplus(logits).sqrt() if scoring == "sqrtsoftplus" else logits


def _states(hidden_size: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(_NUM_STATES, hidden_size, generator=generator, device="cpu")
    states[::2] *= _LARGE
    return states.to(like.device, like.dtype)


def _is_like(logits: Tensor, choice: Tensor) -> bool:
    largest = logits.topk(choice.shape[-1]).indices
    is_there = (choice[:, :, None] == largest[:, None, :]).any(-1)
    return float(is_there.float().mean()) >= _LEAST_EQUAL


def linear_routers(routers: Sequence[Router]) -> list[LinearRouter | None] | None:
    """Return the routers as products; None if any router is neither a product nor by token id.

    The entry of a router that chooses by token id is None.
    """
    found = [None if is_by_token(r.module) else linear_router(r) for r in routers]
    pairs = zip(routers, found, strict=True)
    is_whole = all(linear or is_by_token(router.module) for router, linear in pairs)
    return found if is_whole else None
