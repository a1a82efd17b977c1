"""What a decode step on a GPU costs beside its experts: timed as it will run, in captured segments.

The model's own code takes several times as long, which is the host's time and not the GPU's. With
each layer goes what every layer costs whatever is planned: one wait for the router's choice.
"""

import dataclasses
import gc
import time

from torch import Tensor

from tandem.decode.cuda.slots import CudaSlotPool, MakeCapture
from tandem.experts.execution.batch import ExpertFunctions, RoutedCall
from tandem.experts.execution.device import Device
from tandem.experts.store.host_store import HostStore
from tandem.foreign_types import PreTrainedModel
from tandem.hf.experts import Bound, bind_all
from tandem.hf.lookahead.warm_up import NoExperts, warm_up_ids
from tandem.kv_cache.base import NotInSlotsError
from tandem.policy.cost import HardwareProfile, interpolate

STEP_ROWS = (1, 8)
_PROMPT_TOKENS, _STEPS_BEFORE, _STEPS = 16, 8, 12


class _HandOver(NoExperts):
    """Learns what the routers chose, and computes nothing."""

    def __init__(self, store: HostStore, device: Device) -> None:
        super().__init__(store)
        self._device = device

    def compute(self, call: RoutedCall, functions: ExpertFunctions) -> Tensor:
        self._device.download(call.top_k_index, call.hidden)
        return super().compute(call, functions)


def with_captured_steps(
    profile: HardwareProfile,
    model: PreTrainedModel,
    store: HostStore,
    bound: Bound,
    device: Device,
    make_capture: MakeCapture,
) -> HardwareProfile:
    """Return a profile whose dense parts, for few tokens, are those of captured steps.

    As it was where a model's steps cannot be captured. The experts modules are bound to nothing
    useful afterwards.
    """
    bind_all(bound, _HandOver(store, device))
    found = [_step_seconds(model, num_slots, make_capture) for num_slots in STEP_ROWS]
    gc.collect()  # slots and their steps know each other, and their memory is counted next
    seconds = [each / len(store) for each in found if each is not None]
    if len(seconds) < len(STEP_ROWS):
        return profile
    (shape,) = profile.shapes
    dense = tuple(
        interpolate(STEP_ROWS, seconds, tokens)
        if tokens <= STEP_ROWS[-1]
        else max(seconds[-1], before)
        for tokens, before in zip(shape.tokens, shape.dense_seconds, strict=True)
    )
    return dataclasses.replace(profile, shapes=(dataclasses.replace(shape, dense_seconds=dense),))


def _step_seconds(
    model: PreTrainedModel, num_slots: int, make_capture: MakeCapture
) -> float | None:
    """Time a decode step of so many slots; None if it is not captured."""
    prompt = warm_up_ids(model, _PROMPT_TOKENS).tolist()
    capacity = _PROMPT_TOKENS + _STEPS_BEFORE + _STEPS
    tokens = dict.fromkeys(range(num_slots), prompt[0])
    try:
        pool = CudaSlotPool(model, num_slots, capacity=capacity, make_capture=make_capture)
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
