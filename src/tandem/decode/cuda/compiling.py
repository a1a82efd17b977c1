"""Compiles and loads the kernels of decode steps, except experts', before the first token."""

import contextlib
from collections.abc import Callable
from functools import partial

from tandem.decode.cuda.attention import kernels_for
from tandem.decode.cuda.slots import CudaSlotPool
from tandem.foreign_types import PreTrainedModel
from tandem.kv_cache.base import NotInSlotsError
from tandem.kv_cache.cuda.layers import DecodeKernels
from tandem.policy.step_path import CAPTURE_SIZES, MAX_GRAPH_TOKENS


def step_compilations(
    model: PreTrainedModel,
    find_kernels: Callable[[PreTrainedModel], DecodeKernels | None] = kernels_for,
) -> list[Callable[[], None]]:
    """Return one callable per capture size, which compiles the kernels of a step of that size.

    The experts modules must be bound to an executor that computes nothing. The list is empty if
    slots cannot serve the model.
    """
    try:
        pool = CudaSlotPool(model, MAX_GRAPH_TOKENS, find_kernels=find_kernels)
    except NotInSlotsError:
        return []
    return [partial(_launch_once, pool, count) for count in CAPTURE_SIZES]


def _launch_once(pool: CudaSlotPool, count: int) -> None:
    with contextlib.suppress(Exception):  # the first capture meets it again, and says so
        pool.launch_once(count)
