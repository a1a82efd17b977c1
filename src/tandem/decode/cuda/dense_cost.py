"""Times a GPU decode step without its experts, as captured graphs, which is how steps will run.

The model's own code takes several times as long because of the host. Steps are timed as one graph
without experts. They are timed again in segments, with the costs of a planned layer: a graph break,
and a wait for the router's choice.
"""

import contextlib
import dataclasses
import gc
import time
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from tandem.decode.cuda.graphs import GraphLayers
from tandem.decode.cuda.slots import CudaSlotPool
from tandem.decode.cuda.steps import MakeCapture
from tandem.experts.execution.batch import ExpertFunctions, RoutedCall
from tandem.experts.execution.device import Device
from tandem.experts.store.host_store import HostStore
from tandem.foreign_types import PreTrainedModel
from tandem.hf.experts import Bound, bind_all
from tandem.hf.lookahead.warm_up import NoExperts, warm_up_ids
from tandem.kv_cache.base import NotInSlotsError
from tandem.policy.cost import SEGMENTS, HardwareProfile, HostCosts, interpolate

STEP_TOKENS = (1, 8)
_PROMPT_TOKENS, _STEPS_BEFORE, _STEPS = 16, 8, 12


class _HandOver(NoExperts):
    """An executor that waits for the routers' choices, and computes no experts."""

    def __init__(self, store: HostStore, device: Device) -> None:
        super().__init__(store)
        self._device = device

    def compute(self, call: RoutedCall, functions: ExpertFunctions) -> Tensor:
        self._device.download(call.top_k_index, call.hidden)
        return super().compute(call, functions)


class _NoLayers:
    """`GraphLayers` that compute no experts: the result of each layer is zeros."""

    def __call__(
        self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor, functions: ExpertFunctions
    ) -> Tensor:
        return torch.zeros_like(hidden)

    def take_router_input(self, layer: int, hidden: Tensor) -> bool:
        return True

    def around(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def give_up(self, error: Exception) -> bool:
        return False


def with_captured_steps(
    profile: HardwareProfile,
    model: PreTrainedModel,
    store: HostStore,
    bound: Bound,
    device: Device,
    make_capture: MakeCapture,
) -> HardwareProfile:
    """Return `profile` with dense parts' seconds and host costs measured on captured steps.

    Seconds for more than `STEP_TOKENS[-1]` tokens stay, but are at least the measured seconds for
    that many. The host costs are the time that a graph break adds to a layer. Returns the profile
    unchanged if the model's steps cannot be captured. The caller must bind the experts modules
    again afterwards.
    """
    bind_all(bound, _HandOver(store, device))
    found = [_step_seconds(model, n, make_capture, _NoLayers()) for n in STEP_TOKENS]
    in_segments = _step_seconds(model, 1, make_capture) if None not in found else None
    gc.collect()  # slots and their steps know each other, and their memory is counted next
    seconds = [each / len(store) for each in found if each is not None]
    if len(seconds) < len(STEP_TOKENS) or in_segments is None:
        return profile
    breaks = max(0.0, in_segments / len(store) - seconds[0])
    (shape,) = profile.shapes
    dense = tuple(
        interpolate(STEP_TOKENS, seconds, tokens)
        if tokens <= STEP_TOKENS[-1]
        else max(seconds[-1], before)
        for tokens, before in zip(shape.tokens, shape.dense_seconds, strict=True)
    )
    shape = dataclasses.replace(shape, dense_seconds=dense)
    host = HostCosts(
        path=SEGMENTS, step_seconds=0.0, layer_seconds=breaks, cpu_begin_seconds=0.0,
        cpu_end_seconds=0.0, fetch_seconds=0.0,
    )  # fmt: skip
    return dataclasses.replace(profile, shapes=(shape,), host=(host,))


def _step_seconds(
    model: PreTrainedModel,
    num_slots: int,
    make_capture: MakeCapture,
    layers: GraphLayers | None = None,
) -> float | None:
    """Return the seconds of a decode step of `num_slots` tokens; None if it cannot be captured.

    Without `layers`, the step has a graph break at each MoE layer.
    """
    prompt = warm_up_ids(model, _PROMPT_TOKENS).tolist()
    capacity = _PROMPT_TOKENS + _STEPS_BEFORE + _STEPS
    tokens = dict.fromkeys(range(num_slots), prompt[0])
    try:
        pool = CudaSlotPool(
            model, num_slots, capacity=capacity, make_capture=make_capture, layers=layers
        )
        pool.prefill(dict.fromkeys(range(num_slots), prompt))
        for _ in range(_STEPS_BEFORE):
            pool.decode(tokens)[0, 0].item()
        if not pool.step.is_replaying:
            return None
        begin = time.perf_counter()
        for _ in range(_STEPS):
            pool.decode(tokens)[0, 0].item()  # as a loop that reads every token
        return (time.perf_counter() - begin) / _STEPS
    except NotInSlotsError:
        return None
