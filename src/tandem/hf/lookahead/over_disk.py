"""Runs each next layer's router ahead for a model whose experts are on a disk.

The experts that such a router chooses, and that memory lacks, are read while the disk is idle.
Native code runs the routers within recorded steps, learns the residual vectors and how often a
prediction was right, and pauses where this does not pay (`csrc/disk/look_ahead.cpp`,
`tandem.policy.reads`).
"""

import torch

from tandem.experts.cache.host_slots import AheadRouter
from tandem.experts.execution.look_ahead_routers import SCORINGS
from tandem.foreign_types import PreTrainedModel
from tandem.hf.lookahead.linear_routers import LinearRouter, linear_router
from tandem.hf.lookahead.routers import find_routers
from tandem.hf.lookahead.warm_up import NoExperts
from tandem.hf.runtime import runtime_of
from tandem.hf.token_tables import is_by_token
from tandem.kernels.dense import pack_dense
from tandem.kernels.formats.weight_format import find_format

# Chances of experts near the limit hardly change, and reading weights takes half the time.
_FORMAT = find_format("int8")


@torch.inference_mode()
def look_ahead_over_disk(model: PreTrainedModel) -> None:
    """Let a model's host slots run routers ahead, if it has host slots and products as routers.

    Runs the model without its experts on one token to find the routers; does nothing when called
    again.
    """
    runtime = runtime_of(model)
    slots = None if runtime is None else runtime.host_slots
    if runtime is None or slots is None or slots.looks_ahead or runtime.executor.cache is not None:
        return
    with runtime.using(NoExperts(runtime.store)):  # which experts there are says nothing here
        routers = find_routers(model, runtime.bound, num_tokens=1)
    if isinstance(routers, str):
        slots.run_ahead([], 1)
        return
    linear = [None if is_by_token(router.module) else linear_router(router) for router in routers]
    found = [None, *[None if router is None else _packed(router) for router in linear[1:]]]
    slots.run_ahead(found, routers[0].hidden_size)


def _packed(router: LinearRouter) -> AheadRouter:
    bias = router.bias
    return AheadRouter(
        pack_dense(router.weight, None, _FORMAT),
        [] if bias is None else bias.float().tolist(),
        SCORINGS.index(router.scoring),
    )
