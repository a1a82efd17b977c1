"""Forecasts the speed of a model whose experts do not all fit in memory, on the virtual clock.

The simulation is that of `tandem simulate --disk`, with `typical_routing`: absent experts are read
from the disk while experts in memory are computed. A prompt is assumed to use all experts equally.
"""

import dataclasses
from dataclasses import dataclass

from tandem.experts.cache.host_slots import num_transit, share_of
from tandem.experts.cache.policy_tables import host_slot_eviction
from tandem.forecast.gpu_forecast import GpuForecast, geometry_of
from tandem.forecast.sizes import ModelSizes
from tandem.forecast.speed_forecast import SpeedForecast
from tandem.policy.cost import DiskCosts, ShapeCosts, whole_pages
from tandem.sim.disk import DiskConditions, HostShare, replay_over_disk
from tandem.sim.typical_routing import typical_routing

_EVICTION = "next-use"
_SEQUENCES, _PROMPT_TOKENS, _DECODE_STEPS = 3, 256, 64


@dataclass(frozen=True, slots=True)
class SlotsOverDisk:
    """Host slots for some of a model's experts; all other experts stay on the disk."""

    share: float
    """The share of each layer's experts that memory holds."""
    num_slots: int
    """The number of host slots of all layers together, without transit slots."""
    num_bytes: int
    """Bytes of all slots, transit slots included."""
    is_given: bool = False
    """Whether an option set the memory for the slots; if not, they take the free memory."""


@dataclass(frozen=True, slots=True)
class DiskForecast:
    """Seconds of a prompt and of a decode step with experts on the disk."""

    disk: DiskCosts
    hit_rate: float
    """The share of used experts that were in memory; on a CPU, only decode steps count."""
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float


def slots_over_disk(
    sizes: ModelSizes, room_bytes: int, *, has_device: bool, is_given: bool = False
) -> SlotsOverDisk:
    """Return the host slots that fit in `room_bytes`.

    Raises `CapacityError` if not even the transit slots fit.
    """
    num_layers, num_experts = sizes.num_moe_layers, geometry_of(sizes).num_experts
    slot_bytes, counts = whole_pages(sizes.expert_image_bytes), [num_experts] * num_layers
    share = share_of(room_bytes, [slot_bytes] * num_layers, counts, has_device=has_device)
    num_slots = num_layers * int(num_experts * share)
    num_bytes = (num_slots + num_transit(counts, has_device=has_device)) * slot_bytes
    return SlotsOverDisk(share, num_slots, num_bytes, is_given)


def forecast_from_disk(
    sizes: ModelSizes, in_memory: SpeedForecast, disk: DiskCosts, slots: SlotsOverDisk
) -> DiskForecast:
    """Return the speed on a CPU with the host slots `slots` and the other experts on `disk`.

    `in_memory` is the forecast with all experts in memory.
    """
    costs, rate = costs_in_memory(sizes, in_memory), disk.most_bytes_per_second
    conditions = DiskConditions(
        costs=costs, bytes_per_second=rate, share=slots.share, prompt=_PROMPT_TOKENS
    )
    trace = typical_routing(
        geometry_of(sizes), num_sequences=_SEQUENCES, num_tokens=_PROMPT_TOKENS + _DECODE_STEPS,
        by_token=sizes.by_token,
    )  # fmt: skip
    tally = replay_over_disk(trace, conditions, host_slot_eviction(_EVICTION))
    each_token = costs.top_k / costs.num_experts
    active = 1.0 - (1.0 - each_token) ** in_memory.prompt_tokens
    prompt_bytes = active * (1.0 - conditions.share) * sizes.experts_bytes
    return DiskForecast(
        disk=disk,
        hit_rate=tally.hit_rate,
        prompt_tokens=in_memory.prompt_tokens,
        prefill_seconds=max(prompt_bytes / rate, in_memory.prefill_seconds),
        decode_seconds=tally.decode_seconds / tally.decode_tokens,
    )


def forecast_with_gpu(
    in_memory: GpuForecast, disk: DiskCosts, slots: SlotsOverDisk
) -> DiskForecast:
    """Return the speed with a GPU, the host slots `slots` and the other experts on `disk`.

    `in_memory` is the forecast with all experts in memory. Its simulation runs again, with the same
    planner and settings, but experts outside memory are read from the disk.
    """
    machine = dataclasses.replace(in_memory.run.profile, disk=disk)
    memory = HostShare(share=slots.share, make_eviction=host_slot_eviction(_EVICTION))
    found = dataclasses.replace(in_memory.run, profile=machine).forecast(memory)
    return DiskForecast(
        disk=disk,
        hit_rate=1.0 - found.read_rate,
        prompt_tokens=found.prompt_tokens,
        prefill_seconds=found.prefill_seconds,
        decode_seconds=found.decode_seconds,
    )


def costs_in_memory(sizes: ModelSizes, in_memory: SpeedForecast) -> ShapeCosts:
    """Return the times of an expert and of a layer's dense parts in a decode step of one token.

    The step's forecast time is divided among them by bytes: a step is assumed to read all of its
    weights once, at memory speed.
    """
    geometry = geometry_of(sizes)
    num_uses = geometry.top_k * geometry.num_layers
    step_bytes = num_uses * sizes.expert_image_bytes
    of_experts = step_bytes / (step_bytes + sizes.total_dense_bytes) * in_memory.decode_seconds
    each = of_experts / num_uses
    return ShapeCosts(
        shape=str(sizes.config.model_type),
        num_moe_layers=geometry.num_layers,
        num_experts=geometry.num_experts,
        top_k=geometry.top_k,
        expert_bytes=sizes.expert_image_bytes,
        tokens=(1,),
        cpu_seconds=(each,),
        gpu_seconds=(each,),
        dense_seconds=((in_memory.decode_seconds - of_experts) / geometry.num_layers,),
        cpu_first_expert_seconds=0.0,
        link_seconds_per_expert=0.0,
    )
