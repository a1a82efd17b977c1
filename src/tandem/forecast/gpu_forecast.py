"""Forecasts a model's speed with a GPU: runs its planner on the simulator's virtual clock.

Times come from a named hardware profile, or from a profile measured on two layers with random
weights; routing is `typical_routing`. On an H100 and an H200, decode was 1.3 to 1.6 times slower
than forecast.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import AutoConfig

from tandem.bench.model_shapes import MODEL_SHAPES, ModelShape
from tandem.bench.random_model import build_random_model
from tandem.core.errors import CapacityError
from tandem.core.units import parse_bandwidth
from tandem.devices import kind_of
from tandem.experts.cache.policy_tables import NATIVE_TABLES
from tandem.experts.cache.sizing import DeviceMemory
from tandem.experts.measuring.profiler import with_emulated_gpu, with_link
from tandem.forecast.sizes import ModelSizes, config_sizes
from tandem.forecast.speed_forecast import PROMPT_TOKENS, Forecast, cut_shape
from tandem.hardware.profiles import load_profile, shape_for
from tandem.hf.assembly import profile_of
from tandem.hf.config import OffloadConfig
from tandem.hf.runtime import require_runtime
from tandem.policy.cost import NO_HOST, HardwareProfile, ShapeCosts
from tandem.policy.plan import Geometry
from tandem.policy.settings import PlannerSettings
from tandem.policy.step_path import StepPath
from tandem.sim.disk import HostShare
from tandem.sim.graph_trial import settled
from tandem.sim.replay import ReplaySettings, replay
from tandem.sim.start import SIMULATED_STARTS
from tandem.sim.typical_routing import typical_routing, with_guesses

_DECODE_STEPS = 128
_HEAT_SEQUENCES = 2  # sequences from which earlier runs have learned the experts' popularity
_MEASURED_LAYERS = 2
_LAUNCH_SECONDS = 60e-6  # of a layer's dense parts; the profiles from data sheets assume the same
_SYSTEM_BYTES = 4 << 30  # of a PC with a desktop, assumed


@dataclass(frozen=True, slots=True)
class GpuForecast(Forecast):
    """The speed of one simulated conversation, and how it was simulated."""

    profile: str
    costs_of: str
    """The profile's model shape whose times were scaled to this model's bytes."""
    hit_rate: float
    """The share of active experts that ran from device memory without a copy."""
    host_path: str | None
    """The decode path whose host costs the times include; None if they include no host costs."""
    assignment: str
    """The name of the assignment in decode steps of one token."""
    rules: str
    """A text on the assignment in decode steps of any number of tokens."""
    read_rate: float
    """The share of active experts that were read from a disk; 0 if all are in memory."""
    run: "GpuRun"


def machine_for(sizes: ModelSizes, offload: OffloadConfig) -> HardwareProfile:
    """Return the profile that the options name, else this machine's, measured on two layers.

    A link bandwidth among the options replaces the profile's. Raises `CapacityError` for a GPU that
    is neither here nor in a named profile.
    """
    if offload.profile is not None:
        profile = load_profile(offload.profile)
    elif kind_of(offload.device).holds_dense_parts:
        require_here(offload.device)
        profile = _measured_gpu(sizes, offload)
    else:
        profile = with_emulated_gpu(_measured_cpu(sizes, offload), offload.emulated_speed)
    if offload.link_bandwidth is not None:
        profile = with_link(profile, parse_bandwidth(offload.link_bandwidth))
    return profile


def require_here(device: str) -> None:
    """Raise `CapacityError` if this machine lacks the device.

    The message says how to plan for a device elsewhere.
    """
    try:
        kind_of(device).require()
    except CapacityError as error:
        raise CapacityError(
            f"{error}; to plan for another machine, name its profile (--profile desktop-12gb, "
            "laptop-8gb, or the file of its tandem profile)"
        ) from error


def host_bytes_elsewhere(offload: OffloadConfig) -> int | None:
    """Return the free host memory of the named profile's machine; None to plan for this machine.

    That is the profile's host memory without the 4 GiB that system and desktop are assumed to take.
    """
    is_elsewhere = offload.device == "cpu" or kind_of(offload.device).holds_dense_parts
    if offload.profile is None or not is_elsewhere:
        return None
    return max(0, load_profile(offload.profile).host_memory_bytes - _SYSTEM_BYTES)


def device_memory(offload: OffloadConfig) -> DeviceMemory:
    """Return the memory of the device that the options name; raises as `machine_for` does."""
    kind = kind_of(offload.device)
    if offload.profile is not None and kind.holds_dense_parts:
        total = load_profile(offload.profile).gpu_memory_bytes
        return DeviceMemory(total, total)
    require_here(offload.device)
    return kind.memory()


def measured_shape(sizes: ModelSizes) -> ModelShape:
    """Return a model's shape with its layers up to the first MoE layer, and one layer more."""
    return cut_shape(sizes, min(sizes.moe_layers) + _MEASURED_LAYERS)


def _measured_cpu(sizes: ModelSizes, offload: OffloadConfig) -> HardwareProfile:
    """Return the profile of this CPU and its memory: a stored one, or measured on a few layers."""
    here = dataclasses.replace(
        offload, device="cpu", expert_dtype=sizes.expert_formats[0], expert_memory="auto"
    )
    shape = measured_shape(sizes)
    model = build_random_model(shape, here, dense_dtype=sizes.dense_format)
    profile = profile_of(model)
    require_runtime(model).executor.close()
    return profile


def _measured_gpu(sizes: ModelSizes, offload: OffloadConfig) -> HardwareProfile:
    """Return the profile of this machine's GPU: a stored one, or measured on a few layers."""
    here = dataclasses.replace(offload, expert_dtype=sizes.expert_formats[0], expert_memory="auto")
    shape = measured_shape(sizes)
    # Moving it to the GPU packs it as the options say.
    model = build_random_model(shape, here, dense_dtype="none", device=offload.device)
    executor = require_runtime(model).executor
    executor.close()
    assert executor.cache is not None
    return executor.cache.machine.profile


@dataclass(frozen=True, slots=True)
class GpuRun:
    """The input of one simulation: a model, a machine with a GPU, and the planner's settings."""

    sizes: ModelSizes
    profile: HardwareProfile
    settings: PlannerSettings
    num_slots: int
    """The number of expert slots on the GPU."""
    path: StepPath

    def forecast(self, memory: HostShare | None = None) -> GpuForecast:
        """Simulate a prompt and its decode steps, and return their speed.

        With `memory`, only a share of the experts is in host memory; the rest are read from the
        disk of the profile, which must have one.
        """
        sizes, profile, settings = self.sizes, self.profile, self.settings
        geometry, num_slots, path = geometry_of(sizes), self.num_slots, self.path
        costs = costs_for(sizes, profile)
        trace = typical_routing(
            geometry,
            num_sequences=_HEAT_SEQUENCES + 1,
            num_tokens=PROMPT_TOKENS + _DECODE_STEPS,
            by_token=sizes.by_token,
        )
        heat = trace.sequences(0, _HEAT_SEQUENCES)
        is_resident = num_slots >= sizes.num_experts
        if is_resident:  # as when loading: slots for all experts, and for copies
            num_slots = settings.slots_for(num_slots)
        charged = profile.charged(costs, path.host_path)
        if path.in_graph:
            settings = settled(
                settings, profile, charged, geometry, num_slots,
                tables=NATIVE_TABLES, memory=memory,
            )  # fmt: skip
        run = ReplaySettings(
            settings=settings,
            profile=profile,
            shape=charged,
            num_slots=num_slots,
            prompt=PROMPT_TOKENS,
            compare_every=0,
            memory=memory,
            in_graph=path.in_graph,
            tables=NATIVE_TABLES,
        )
        set_sizes = settings.set_sizes(geometry, num_slots)
        resident = SIMULATED_STARTS.factory("hottest")(geometry, set_sizes, heat)
        played = trace.sequences(_HEAT_SEQUENCES, _HEAT_SEQUENCES + 1)
        if settings.asking_sizes:
            played = with_guesses(played)
        tally = steps = replay(played, run, resident=resident)
        if is_resident:  # prompts are still handed over layer by layer
            shape = profile.charged(costs, path.host_path, is_resident=True)
            steps = replay(played, dataclasses.replace(run, shape=shape), resident=resident)
        return GpuForecast(
            profile=profile.name,
            costs_of=costs.shape,
            prompt_tokens=tally.prefill_tokens,
            prefill_seconds=tally.prefill_seconds,
            decode_seconds=steps.decode_seconds / steps.decode_tokens,
            hit_rate=tally.hits / tally.demands,
            host_path=None if path.host_path == NO_HOST else path.host_path,
            assignment=settings.rule(graph_tokens=int(path.in_graph)),
            rules=settings.graph_rules() if path.in_graph else settings.rule(),
            read_rate=tally.reads / tally.demands,
            run=self,
        )


def geometry_of(sizes: ModelSizes) -> Geometry:
    """Return the planner's geometry; each layer has the average number of experts, rounded up."""
    num_experts = math.ceil(sizes.num_experts / sizes.num_moe_layers)
    return Geometry(sizes.num_moe_layers, num_experts, min(sizes.top_k, num_experts))


def costs_for(sizes: ModelSizes, profile: HardwareProfile) -> ShapeCosts:
    """Return a model's costs: the costs of the profile's most similar shape, scaled by bytes.

    The costs exclude the host's work, which does not depend on bytes.
    """
    geometry = geometry_of(sizes)
    near = shape_for(profile, str(sizes.config.model_type), geometry)
    ratio = sizes.expert_image_bytes / near.expert_bytes
    dense_seconds = near.dense_seconds
    if near.shape in MODEL_SHAPES:  # its dense parts have 16 bits
        known = shape_sizes(MODEL_SHAPES[near.shape], OffloadConfig())
        dense_seconds = _dense_seconds(near.dense_seconds, known, sizes)
    return dataclasses.replace(
        near,
        num_moe_layers=geometry.num_layers,
        num_experts=geometry.num_experts,
        top_k=geometry.top_k,
        expert_bytes=sizes.expert_image_bytes,
        cpu_seconds=tuple(seconds * ratio for seconds in near.cpu_seconds),
        gpu_seconds=tuple(seconds * ratio for seconds in near.gpu_seconds),
        dense_seconds=dense_seconds,
        link_seconds_per_expert=near.link_seconds_per_expert * ratio,
    )


def shape_sizes(shape: ModelShape, offload: OffloadConfig) -> ModelSizes:
    """Return a released model's sizes from its shape alone; unpacked weights count as bf16."""
    config = AutoConfig.for_model(shape.model_type, **shape.values)
    config.dtype = torch.bfloat16
    return config_sizes(config, offload)


def _dense_seconds(
    known_seconds: tuple[float, ...], known: ModelSizes, sizes: ModelSizes
) -> tuple[float, ...]:
    """Return the seconds of a layer's dense parts by token count, from those of a known shape.

    With few tokens, launches and reading the weights take the time; with many tokens, arithmetic,
    which packing does not change.
    """
    of_known = _layer_bytes(known.plain_dense_bytes, known)
    arithmetic = _layer_bytes(sizes.plain_dense_bytes, sizes) / of_known
    memory = _layer_bytes(sizes.dense_bytes, sizes) / of_known
    if memory == arithmetic:
        return tuple(seconds * memory for seconds in known_seconds)
    few = known_seconds[0]
    launches = min(_LAUNCH_SECONDS, few)
    least = launches + (few - launches) * memory
    return tuple(
        least if seconds == few else max(least, seconds * arithmetic) for seconds in known_seconds
    )


def _layer_bytes(parts: Mapping[str, int], sizes: ModelSizes) -> float:
    """Return the average bytes of a layer's dense parts, without embeddings and head."""
    own = (num_bytes for part, num_bytes in parts.items() if "embeddings" not in part)
    return sum(own) / sizes.num_layers
