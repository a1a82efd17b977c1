"""`tandem plan`: what goes where, how many bytes and how fast, before anything is loaded."""

import argparse
import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.bench.model_shapes import DENSE_SHAPES, MODEL_SHAPES, find_shape
from tandem.cli.keeping import cache_dir
from tandem.cli.model_choice import ModelChoice, add_model, find_model, import_transformers
from tandem.cli.progress import waiting
from tandem.core.config import add_flags, from_flags, option, require_range
from tandem.core.errors import CapacityError
from tandem.core.units import format_bytes
from tandem.devices.options import OffloadOptions, offload_options

if TYPE_CHECKING:
    from tandem.forecast.disk_forecast import DiskForecast, SlotsOverDisk
    from tandem.forecast.model_plan import AnyForecast, Plan
    from tandem.forecast.sizes import ModelSizes
    from tandem.hf.config import OffloadConfig

# What advice is given about, largest first.
_OTHER_FORMATS = ("int8", "int4")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `tandem plan` beside those of offloading."""

    dense_dtype: str = option("auto", help="as in tandem run", metavar="DTYPE")
    context: int | None = option(
        None, help="tokens of a conversation (default: 4096, or the model's context)", metavar="N"
    )
    measure: bool = option(
        True, help="forecast the speed, measured once on a few layers with random weights"
    )
    refresh: bool = option(False, help="measure again, also where a forecast is kept")
    shape: str | None = option(
        None,
        help="plan for a released model without its files: "
        + ", ".join(MODEL_SHAPES | DENSE_SHAPES),
    )
    host_path: str | None = option(
        None, help="whose host costs of --profile count: segments, graph or none", metavar="NAME"
    )
    json: bool = option(False, help="last line of standard output: one JSON object")

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.context is not None:
            require_range("context", self.context, 1, what="a number of tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tandem plan`."""
    add_model(parser)
    add_flags(parser, PlanOptions)
    add_flags(parser, OffloadOptions)


def run(flags: argparse.Namespace) -> int:
    """Forecast and print; returns the exit code: 0 also for a model that does not fit."""
    options = from_flags(PlanOptions, flags)
    offload = offload_options(flags, also_of_cpu=("profile",))
    source = from_flags(ModelChoice, flags)
    if options.shape is None:
        source = find_model(source, quiet=True)
    import_transformers(quiet=False, has_bars=False)
    with waiting("planning, with some layers measured"):
        plan, others = _plan(source, options, offload)

    from tandem.experts.store.host_memory import total_bytes
    from tandem.forecast.model_plan import advice, as_json
    from tandem.forecast.windows_check import plan_advice

    lines = advice(plan, others)
    if options.shape is None:
        lines += plan_advice(Path(source.model), fits=plan.fits, total_bytes=total_bytes())
    print(_table(plan))
    for line in lines:
        print(f"- {line}")
    if options.json:
        print(json.dumps(as_json(plan, lines)))
    return 0


def _plan(
    source: ModelChoice, options: PlanOptions, offload: OffloadOptions
) -> "tuple[Plan, dict[str, ModelSizes]]":
    from tandem.devices import kind_of
    from tandem.experts.store.host_memory import available_bytes, process_bytes
    from tandem.forecast.gpu_forecast import device_memory, host_bytes_elsewhere
    from tandem.forecast.model_plan import Plan, plan_slots
    from tandem.generate.generator import Generator  # noqa: F401  its modules are part of a run
    from tandem.hf.config import OffloadConfig

    def config(**own: str) -> OffloadConfig:
        return OffloadConfig(
            **asdict(offload) | {"dense_dtype": options.dense_dtype} | own,
            isa=os.environ.get("TANDEM_ISA"),
            cache_dir=str(cache_dir()),
        )

    chosen = config()
    process, elsewhere = process_bytes(), host_bytes_elsewhere(chosen)
    # Of another machine's memory this program would take there what it takes here.
    available = available_bytes() if elsewhere is None else max(0, elsewhere - process)
    all_sizes_with, packed_files = _sizes_with(source, options.shape)

    memory = device_memory(chosen)
    on_device = memory.free_bytes if kind_of(offload.device).holds_dense_parts else None

    def sizes_with(config: OffloadConfig) -> "ModelSizes":
        # A profile says which machine is meant, which a dense model may be planned for, too.
        found = all_sizes_with(dataclasses.replace(config, profile=None))
        return found.within(available, offload.expert_memory_bytes, on_device)

    is_packed = bool(packed_files)
    sizes = sizes_with(chosen)
    what = "dense_dtype" if sizes.is_dense else "expert_dtype"
    formats = () if is_packed else _OTHER_FORMATS
    others = {name: sizes_with(config(**{what: name})) for name in formats}
    context = sizes.context(options.context)
    slots, gpu_bytes = plan_slots(
        sizes, device=offload.device, gpu_memory=offload.gpu_memory, memory=memory,
        context_tokens=context, others=others,
    )  # fmt: skip
    plan = Plan(
        sizes=sizes,
        context_tokens=context,
        process_bytes=process,
        available_bytes=available,
        device=offload.device,
        gpu_bytes=gpu_bytes,
        gpu_available_bytes=0 if offload.device == "cpu" else memory.free_bytes,
        expert_slots=slots,
        speed=_speed(sizes, chosen, slots, options),
        can_be_packed=not is_packed,
    )
    slots_over_disk, from_disk = _over_disk(plan, packed_files, offload)
    found = dataclasses.replace(plan, slots_over_disk=slots_over_disk, from_disk=from_disk)
    return found, others


def _over_disk(
    plan: "Plan", files: Sequence[Path], offload: OffloadOptions
) -> "tuple[SlotsOverDisk | None, DiskForecast | None]":
    """Return what memory holds of a packed model with some experts on the disk, and its speed.

    Those that do not fit, or beyond `expert_memory`; None where there are none. The speed on the
    CPU, where that was measured. Raises `TandemError` for what a load refuses.
    """
    given, is_plain = offload.expert_memory_bytes, plan.sizes.has_plain_experts
    if given is not None and is_plain:
        raise offload.no_slots_for_plain()
    if given is not None and not files:
        offload.require_no_slots("this model")
    from tandem.forecast.disk_forecast import forecast_from_disk, slots_over_disk
    from tandem.forecast.speed_forecast import SpeedForecast
    from tandem.hardware.disk import measure_disk
    from tandem.hf.disk_tier import room_for_experts

    has_all = plan.fits if given is None else given >= plan.sizes.experts_bytes
    is_elsewhere = given is None and offload.device != "cpu"
    if has_all or not files or is_plain or plan.sizes.is_dense or is_elsewhere:
        return None, None
    room = given
    if room is None:  # as loading shares the memory out, once the dense parts are there
        free = max(0, plan.available_bytes - plan.sizes.total_dense_bytes)
        room = room_for_experts(free, plan.kv_cache_bytes)
    try:
        slots = slots_over_disk(plan.sizes, room)
    except CapacityError:  # not even the slots that layers share
        if given is not None:
            raise
        return None, None
    if not isinstance(plan.speed, SpeedForecast):
        return slots, None
    disk = measure_disk(files, plan.sizes.expert_image_bytes)
    if disk is None:
        return slots, None
    return slots, forecast_from_disk(plan.sizes, plan.speed, disk, slots)


def _sizes_with(
    source: ModelChoice, shape: str | None
) -> "tuple[Callable[[OffloadConfig], ModelSizes], list[Path]]":
    """Return what gives a model's sizes under some options, and its files if they are packed."""
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
    sizes: "ModelSizes", offload: "OffloadConfig", num_slots: int, options: PlanOptions
) -> "AnyForecast | str":
    """Return the forecast that was asked for, or why there is none."""
    from tandem.forecast.cpu_forecast import forecast_from_profile
    from tandem.forecast.gpu_forecast import forecast_on_gpu, machine_for
    from tandem.forecast.speed_forecast import forecast_speed, why_not_measured
    from tandem.hardware.profiles import load_profile
    from tandem.policy.step_path import run_path, step_path

    if not options.measure:
        return "not forecast (--no-measure)"
    if offload.device == "cpu" and offload.profile is not None:
        return forecast_from_profile(sizes, load_profile(offload.profile))
    if offload.device == "cpu":
        return forecast_speed(sizes, offload, cache_dir=cache_dir(), refresh=options.refresh)
    if sizes.is_dense:
        return "not forecast: profiles have no times of a dense model on a GPU"
    reason = why_not_measured(sizes) if offload.profile is None else ""
    if reason:
        return reason
    machine = machine_for(sizes, offload)
    asked, why_planned = options.host_path, offload.why_planned()
    if asked is None:
        path = run_path(machine, why_planned)
    else:
        path = step_path(machine, asked, why_planned)
    return forecast_on_gpu(sizes, machine, offload.planner_settings(), num_slots, path)


def _table(plan: "Plan") -> str:
    """Return the plan for people."""
    sizes = plan.sizes
    rows = list(sizes.dense_bytes.items())
    if sizes.is_dense:
        rows = [(part.removeprefix("shared experts and "), size) for part, size in rows]
    else:
        formats = ", ".join(sizes.expert_formats)
        rows.insert(0, (f"experts ({sizes.num_experts} in {formats})", sizes.experts_bytes))
    if sizes.disk_table_bytes:
        rows.append(("tables of rows, which stay on the disk", sizes.disk_table_bytes))
    rows += [
        (f"KV cache, {plan.context_tokens} tokens", plan.kv_cache_bytes),
        *_state_rows(plan),
        ("activations of a prompt, at most", plan.workspace_bytes),
        ("the program itself", plan.process_bytes),
    ]
    lines = ["a dense model: it has no experts to share"] * sizes.is_dense
    lines += [f"{name:<42} {format_bytes(num_bytes):>10}" for name, num_bytes in rows]
    verdict = "fits" if plan.fits else "does not fit"
    free = format_bytes(plan.available_bytes + plan.process_bytes)
    lines.append(f"{'host memory':<42} {format_bytes(plan.host_bytes):>10}  {verdict}: {free} free")
    by_context = ", ".join(
        f"{_tokens(count)} {format_bytes(sizes.kv.bytes_of(count))}" for count in plan.contexts
    )
    lines.append(f"KV cache by context: {by_context}")
    if plan.device != "cpu":
        lines.append(_device_line(plan))
    lines += _speed_lines(plan)
    if plan.slots_over_disk is not None:
        lines.append(_disk_line(plan.slots_over_disk, plan.from_disk))
    return "\n".join(lines)


def _disk_line(slots: "SlotsOverDisk", found: "DiskForecast | None") -> str:
    """Say what is left of the speed where the disk holds what memory does not."""
    fit = f"from the disk: {slots.share:.0%} of the experts fit"
    if found is None:
        return (
            f"{fit} into {slots.num_slots} slots, the others are read when they are wanted; the "
            "disk's rate was not measured"
        )
    return (
        f"{fit}, the others are read at "
        f"{found.disk.most_bytes_per_second / 1e9:.2f} GB/s ({found.disk.reads}): first token of "
        f"{found.prompt_tokens} after {found.prefill_seconds:.2f} s, then "
        f"{1 / found.decode_seconds:.1f} tok/s, {found.hit_rate:.0%} of the experts from memory "
        "(simulated with typical routing)"
    )


def _tokens(count: int) -> str:
    return str(count) if count % 1024 else f"{count // 1024}k"


def _state_rows(plan: "Plan") -> list[tuple[str, int]]:
    """Return what a sequence's states take, for a model that has some."""
    if not plan.sizes.state_bytes:
        return []
    rows = [("states of a sequence", plan.sizes.state_bytes)]
    if plan.checkpoint_bytes:
        rows.append(("checkpoints of states, at most", plan.checkpoint_bytes))
    return rows


def _device_line(plan: "Plan") -> str:
    """Say what the device's memory goes to, and what is left of it."""
    parts = plan.gpu_bytes
    dense = "weights" if plan.sizes.is_dense else "dense parts"
    names = {"dense": dense, "kv_cache": "KV cache", "workspace": "activations"}
    others = "".join(
        f", {name} {format_bytes(parts[key])}" for key, name in names.items() if parts[key]
    )
    left = plan.gpu_available_bytes - sum(parts.values())
    if plan.sizes.is_dense:
        here = "all of the model"
    else:
        slots, experts = plan.expert_slots, plan.sizes.num_experts
        here = f"{slots} of {experts} experts in {format_bytes(parts['experts'])}"
    return f"{plan.device}: {here}{others}, {format_bytes(left)} left free"


def _speed_lines(plan: "Plan") -> list[str]:
    from tandem.forecast.cpu_forecast import ProfileForecast
    from tandem.forecast.gpu_forecast import GpuForecast
    from tandem.forecast.speed_forecast import FIRST_TOKENS

    speed = plan.speed
    if isinstance(speed, str):
        return [f"speed: {speed}"]
    line = (
        f"speed: first token of {speed.prompt_tokens} after {speed.prefill_seconds:.2f} s "
        f"({speed.prefill_tokens_per_second:.0f} tok/s), then "
        f"{speed.decode_tokens_per_second:.1f} tok/s"
    )
    if isinstance(speed, GpuForecast):
        host = "no" if speed.host_path is None else f"the {speed.host_path} path's"
        return [
            f"{line}, {speed.hit_rate:.0%} of experts from the device's memory (simulated with the "
            f"times of {speed.costs_of} on {speed.profile} and typical routing, {host} host costs, "
            f"decode steps by {speed.rules}; these forecasts have not been compared with a "
            "GPU)"
        ]
    if isinstance(speed, ProfileForecast):
        return [f"{line} (by bytes, from the times of {speed.costs_of} on {speed.profile})"]
    layers = plan.sizes.num_layers
    how = "whole" if speed.measured_layers >= layers else f"on {speed.measured_layers}"
    return [
        f"{line} (measured {how} of {layers} layers with random weights)",
        f"right after loading: first token of {speed.prompt_tokens} after "
        f"{speed.first_prefill_seconds:.2f} s, then {FIRST_TOKENS} tokens at "
        f"{speed.first_tokens_per_second:.1f} tok/s while their steps are recorded",
    ]
