"""Plans one model in the requested format and in other formats, before anything is loaded."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.bench.model_shapes import find_shape
from tandem.cli.keeping import cache_dir
from tandem.cli.model_choice import ModelChoice
from tandem.core.errors import CapacityError
from tandem.devices.options import OffloadOptions

if TYPE_CHECKING:
    from tandem.experts.cache.sizing import DeviceMemory
    from tandem.forecast.disk_forecast import DiskForecast, SlotsOverDisk
    from tandem.forecast.model_plan import AnyForecast, Plan
    from tandem.forecast.sizes import ModelSizes
    from tandem.hf.config import OffloadConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The options of a `Planner`, apart from `OffloadOptions`."""

    dense_dtype: str
    context: int | None
    sequences: int
    measure: bool
    refresh: bool
    shape: str | None
    host_path: str | None
    draft: str | None
    image_tokens: int
    memory_bytes: int | None
    """Host memory of the target machine; None: the profile's, or the free memory here."""


class Planner:
    """Plans one model on one machine; the model's formats may differ from plan to plan."""

    def __init__(self, source: ModelChoice, request: PlanRequest, offload: OffloadOptions) -> None:
        """Read the checkpoint's headers and find how much memory there is."""
        from tandem.devices import kind_of
        from tandem.experts.store.host_memory import available_bytes, process_bytes
        from tandem.forecast.gpu_forecast import device_memory, host_bytes_elsewhere
        from tandem.generate.generator import Generator  # noqa: F401  modules of a run

        self._request, self._offload = request, offload
        chosen = self._config()
        self._process_bytes, elsewhere = process_bytes(), host_bytes_elsewhere(chosen)
        if request.memory_bytes is not None:
            elsewhere = request.memory_bytes
        # On another machine this program would take as much memory as it takes here.
        self._available_bytes = (
            available_bytes() if elsewhere is None else max(0, elsewhere - self._process_bytes)
        )
        self._sizes_with, self._packed_files = _sizes_with(source, request.shape)
        self._memory: DeviceMemory = device_memory(chosen)
        is_on_device = kind_of(offload.device).holds_dense_parts
        self._on_device = self._memory.free_bytes if is_on_device else None

    @property
    def is_packed(self) -> bool:
        """Whether the checkpoint is packed, so that its formats are fixed."""
        return bool(self._packed_files)

    def sizes(self, **own: str) -> "ModelSizes":
        """Return the model's sizes; `own` are options that replace the requested ones."""
        # The profile names the machine; a dense model may be planned for that machine, too.
        config = dataclasses.replace(self._config(**own), profile=None)
        found = self._sizes_with(config)
        expert_memory = self._offload.expert_memory_bytes
        return found.within(self._available_bytes, expert_memory, self._on_device)

    def plan(self, sizes: "ModelSizes", others: "Mapping[str, ModelSizes]") -> "Plan":
        """Return the plan without a speed; raises `CapacityError` if a GPU is too small.

        For a dense model, the error names which of `others`, its sizes by format, would fit.
        """
        from tandem.forecast.model_plan import Plan, plan_slots

        offload, context = self._offload, sizes.context(self._request.context)
        slots, gpu_bytes = plan_slots(
            sizes, device=offload.device, gpu_memory=offload.gpu_memory, memory=self._memory,
            context_tokens=context, sequences=self._request.sequences, others=others,
        )  # fmt: skip
        return Plan(
            sizes=sizes,
            context_tokens=context,
            process_bytes=self._process_bytes,
            available_bytes=self._available_bytes,
            device=offload.device,
            gpu_bytes=gpu_bytes,
            gpu_available_bytes=0 if offload.device == "cpu" else self._memory.free_bytes,
            expert_slots=slots,
            speed="not forecast",
            can_be_packed=not self.is_packed,
            sequences=self._request.sequences,
            draft=self._draft(),
            image_tokens=self._request.image_tokens,
        )

    def _draft(self) -> "ModelSizes | None":
        """Return the draft model's sizes as `load_small` loads it; None without a draft model."""
        from tandem.forecast.sizes import model_sizes
        from tandem.generate.speculation.small_model import small_options
        from tandem.hf.checkpoint import open_model

        if self._request.draft is None:
            return None
        checkpoint = open_model(Path(self._request.draft))
        return model_sizes(checkpoint, small_options(checkpoint))

    def with_speed(self, plan: "Plan", **own: str) -> "Plan":
        """Return the plan with its forecast speed, and the speed with experts on the disk.

        `own` must be the options with which the plan's sizes were made.
        """
        speed = _speed(plan.sizes, self._config(**own), plan.expert_slots, self._request)
        plan = dataclasses.replace(plan, speed=speed)
        slots, from_disk = _over_disk(plan, self._packed_files, self._offload)
        return dataclasses.replace(plan, slots_over_disk=slots, from_disk=from_disk)

    def _config(self, **own: str) -> "OffloadConfig":
        from tandem.hf.config import OffloadConfig

        return OffloadConfig(
            **asdict(self._offload) | {"dense_dtype": self._request.dense_dtype} | own,
            isa=os.environ.get("TANDEM_ISA"),
            cache_dir=str(cache_dir()),
        )


def _over_disk(
    plan: "Plan", files: Sequence[Path], offload: OffloadOptions
) -> "tuple[SlotsOverDisk | None, DiskForecast | None]":
    """Return the host slots and the speed of a model that runs from the disk.

    Experts stay on the disk if they do not fit into memory, or exceed `expert_memory`. Both results
    are None if no expert stays on the disk, or if there is no room for slots. The speed is None if
    the plan has no speed, or if the disk was not measured. Raises `TandemError` where loading
    would.
    """
    expert_memory, is_plain = offload.expert_memory_bytes, plan.sizes.has_plain_experts
    if expert_memory is not None and is_plain:
        raise offload.no_slots_for_plain()
    if expert_memory is not None and not files:
        offload.require_no_slots("this model")
    from tandem.devices import kind_of
    from tandem.forecast.disk_forecast import slots_over_disk

    has_all = plan.fits if expert_memory is None else expert_memory >= plan.sizes.experts_bytes
    if has_all or not files or is_plain or plan.sizes.is_dense:
        return None, None
    room = _room_for_slots(plan) if expert_memory is None else expert_memory
    try:
        slots = slots_over_disk(
            plan.sizes, room, has_device=kind_of(plan.device).machine != "",
            is_given=expert_memory is not None,
        )  # fmt: skip
    except CapacityError:  # not even room for the slots that layers share
        if expert_memory is not None:
            raise
        return None, None
    return slots, _from_disk(plan, slots, files, offload.profile)


def _room_for_slots(plan: "Plan") -> int:
    """Return the bytes of host memory left for experts, as loading computes them."""
    from tandem.devices import kind_of
    from tandem.hf.disk_tier import room_for_experts

    sizes, on_gpu = plan.sizes, plan.is_dense_on_gpu
    taken = sizes.host_bytes if on_gpu else sizes.total_dense_bytes
    if kind_of(plan.device).is_in_host_memory:
        taken += plan.gpu_bytes["experts"]
    free = max(0, plan.available_bytes - taken)
    return room_for_experts(free, 0 if on_gpu else plan.kv_cache_bytes)


def _from_disk(
    plan: "Plan", slots: "SlotsOverDisk", files: Sequence[Path], profile: str | None
) -> "DiskForecast | None":
    """Return the speed with experts on the profile's disk; without a profile, on this machine's.

    Returns None if the plan's speed is neither measured nor simulated, or if the disk's rate is
    unknown.
    """
    from tandem.forecast.disk_forecast import forecast_from_disk, forecast_with_gpu
    from tandem.forecast.gpu_forecast import GpuForecast
    from tandem.forecast.speed_forecast import SpeedForecast
    from tandem.hardware.disk import measure_disk
    from tandem.hardware.profiles import load_profile

    speed = plan.speed
    if not isinstance(speed, (SpeedForecast, GpuForecast)):
        return None
    if profile is not None:
        disk = load_profile(profile).disk
    else:
        disk = measure_disk(files, plan.sizes.expert_image_bytes)
    if disk is None:
        return None
    if isinstance(speed, GpuForecast):
        return forecast_with_gpu(speed, disk, slots)
    return forecast_from_disk(plan.sizes, speed, disk, slots)


def _sizes_with(
    source: ModelChoice, shape: str | None
) -> "tuple[Callable[[OffloadConfig], ModelSizes], list[Path]]":
    """Return a function from options to the model's sizes, and the packed weight files, if any."""
    from tandem.forecast.completeness import require_complete
    from tandem.forecast.sizes import model_sizes
    from tandem.hf.checkpoint import open_model

    if shape is not None:
        from tandem.forecast.gpu_forecast import shape_sizes

        return partial(shape_sizes, find_shape(shape)), []
    checkpoint = open_model(Path(source.model), may_run_code=source.trust_remote_code)
    require_complete(checkpoint)
    files = checkpoint.weight_files if checkpoint.is_packed else []
    return partial(model_sizes, checkpoint), files


def _speed(
    sizes: "ModelSizes", offload: "OffloadConfig", num_slots: int, request: PlanRequest
) -> "AnyForecast | str":
    """Return the forecast that the request and the options ask for, or why there is none."""
    from tandem.forecast.cpu_forecast import forecast_from_profile
    from tandem.forecast.gpu_forecast import GpuRun, machine_for
    from tandem.forecast.speed_forecast import forecast_speed, why_not_measured
    from tandem.hardware.profiles import load_profile
    from tandem.policy.step_path import run_path, step_path

    if not request.measure:
        return "not forecast (--no-measure)"
    if offload.device == "cpu" and offload.profile is not None:
        return forecast_from_profile(sizes, load_profile(offload.profile))
    if offload.device == "cpu":
        return forecast_speed(sizes, offload, cache_dir=cache_dir(), refresh=request.refresh)
    if sizes.is_dense:
        return "not forecast: profiles have no times of a dense model on a GPU"
    reason = why_not_measured(sizes) if offload.profile is None else ""
    if reason:
        return reason
    machine = machine_for(sizes, offload)
    named, why_planned = request.host_path, offload.why_planned()
    if named is None:
        path = run_path(machine, why_planned)
    else:
        path = step_path(machine, named, why_planned)
    return GpuRun(sizes, machine, offload.planner_settings(), num_slots, path).forecast()
