"""`tandem plan`: forecasts placement, bytes and speed before anything is loaded."""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.bench.model_shapes import DENSE_SHAPES, MODEL_SHAPES
from tandem.cli.model_choice import ModelChoice, add_model, find_model, import_transformers
from tandem.cli.planner import Planner, PlanRequest
from tandem.cli.progress import waiting
from tandem.core.config import add_flags, from_flags, option, require_range
from tandem.core.errors import ConfigError
from tandem.core.units import format_bytes, parse_bytes
from tandem.devices.options import OffloadOptions, offload_options

if TYPE_CHECKING:
    from tandem.forecast.disk_forecast import DiskForecast, SlotsOverDisk
    from tandem.forecast.largest_size import SizeProposal
    from tandem.forecast.model_plan import Plan
    from tandem.forecast.sizes import ModelSizes

# The formats that advice considers, largest first.
_OTHER_FORMATS = ("int8", "int4")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `tandem plan`, apart from `OffloadOptions`."""

    dense_dtype: str = option("auto", help="see tandem run --help-all", metavar="DTYPE")
    context: int | None = option(
        None,
        help="number of tokens of a conversation (default: 4096, or the model's context)",
        metavar="N",
    )
    sequences: int = option(
        1, help="number of simultaneous conversations, each of --context tokens", metavar="N"
    )
    draft: str | None = option(None, help="small draft model, as in tandem run", metavar="MODEL")
    image_tokens: int = option(
        0, help="image tokens of one prompt; the vision tower needs memory for them", metavar="N"
    )
    measure: bool = option(
        True, help="forecast the speed, measured once on a few layers with random weights"
    )
    refresh: bool = option(False, help="measure again even if there is a stored forecast")
    shape: str | None = option(
        None,
        help="plan for a released model without its files: "
        + ", ".join(MODEL_SHAPES | DENSE_SHAPES),
    )
    memory: str | None = option(
        None, help="host memory of the target machine (default: what is free here)",
        metavar="SIZE",
    )  # fmt: skip
    tokens_per_second: float | None = option(
        None, help="propose the largest packed size with at least this forecast speed",
        metavar="N",
    )  # fmt: skip
    host_path: str | None = option(
        None,
        help="path whose host costs of --profile are added: segments, graph or none",
        metavar="NAME",
    )
    json: bool = option(False, help="print one JSON object on the last line of standard output")

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.context is not None:
            require_range("context", self.context, 1, what="a number of tokens")
        require_range("image_tokens", self.image_tokens, 0, what="a number of tokens")
        require_range("sequences", self.sequences, 1, what="a number of conversations")
        if self.tokens_per_second is not None:
            require_range("tokens_per_second", self.tokens_per_second, 0.01, 1e6, what="a speed")
            if not self.measure:
                raise ConfigError("--tokens-per-second needs a forecast; leave --no-measure out")
        if self.memory is not None:
            parse_bytes(self.memory, name="--memory")

    def request(self) -> PlanRequest:
        """Return the options as the request that `Planner` takes."""
        return PlanRequest(
            dense_dtype=self.dense_dtype, context=self.context, sequences=self.sequences,
            measure=self.measure, refresh=self.refresh, shape=self.shape,
            host_path=self.host_path, draft=self.draft, image_tokens=self.image_tokens,
            memory_bytes=None if self.memory is None else parse_bytes(self.memory),
        )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tandem plan`."""
    add_model(parser)
    add_flags(parser, PlanOptions)
    add_flags(parser, OffloadOptions)


def run(flags: argparse.Namespace) -> int:
    """Forecast and print; returns the exit code, which is 0 even if the model does not fit."""
    options = from_flags(PlanOptions, flags)
    offload = offload_options(flags, also_of_cpu=("profile",))
    source = from_flags(ModelChoice, flags)
    if options.draft is not None:
        drafter = find_model(ModelChoice(model=options.draft), quiet=True)
        options = replace(options, draft=drafter.model)
    if options.shape is None:
        source = find_model(source, quiet=True)
    import_transformers(quiet=False, has_bars=False)
    with waiting("planning, with some layers measured"):
        planner = Planner(source, options.request(), offload)
        plan, others = _plan(planner)
        proposal = _proposal(planner, options, plan.sizes)

    from tandem.experts.store.host_memory import total_bytes
    from tandem.forecast.model_plan import advice, as_json
    from tandem.forecast.windows_check import plan_advice

    lines = advice(plan, others)
    if options.shape is None:
        lines += plan_advice(Path(source.model), fits=plan.fits, total_bytes=total_bytes())
    print(_table(plan))
    if proposal is not None:
        lines.insert(0, proposal.sentence("MODEL" if options.shape else source.model))
    for line in lines:
        print(f"- {line}")
    if options.json:
        more = {} if proposal is None else {"largest_size": proposal.as_json()}
        print(json.dumps(as_json(plan, lines) | more))
    return 0


def _plan(planner: Planner) -> "tuple[Plan, dict[str, ModelSizes]]":
    """Return the requested plan, and the model's sizes by other format, for advice."""
    sizes = planner.sizes()
    what = "dense_dtype" if sizes.is_dense else "expert_dtype"
    formats = () if planner.is_packed else _OTHER_FORMATS
    others = {name: planner.sizes(**{what: name}) for name in formats}
    return planner.with_speed(planner.plan(sizes, others)), others


def _proposal(planner: Planner, options: PlanOptions, sizes: "ModelSizes") -> "SizeProposal | None":
    """Return the largest packed size that reaches the requested speed; None without a request.

    Raises `ConfigError` if the model is packed already.
    """
    from tandem.forecast.largest_size import largest_size

    if options.tokens_per_second is None:
        return None
    if planner.is_packed:
        raise ConfigError(
            "--tokens-per-second proposes a size to pack a model in, and this one is packed; give "
            "the checkpoint that it was packed from"
        )

    def own(name: str) -> dict[str, str]:
        of_dense = {"dense_dtype": "none" if name == "bf16" else name}
        return of_dense if sizes.is_dense else {"expert_dtype": name, **of_dense}

    def plan_with(name: str) -> "Plan":
        return planner.plan(planner.sizes(**own(name)), {})

    plain = planner.sizes(**own("bf16"))
    return largest_size(
        plan_with, lambda name, plan: planner.with_speed(plan, **own(name)),
        num_weights=(plain.experts_bytes + plain.total_dense_bytes) // 2,
        tokens_per_second=options.tokens_per_second,
    )  # fmt: skip


def _table(plan: "Plan") -> str:
    """Return the plan as text: a row for each use of host memory, then device, speed and disk."""
    from tandem.forecast.model_plan import FORWARD_BYTES

    sizes = plan.sizes
    rows = list(sizes.dense_bytes.items())
    if sizes.is_dense:
        rows = [(part.removeprefix("shared experts and "), size) for part, size in rows]
    else:
        formats = ", ".join(sizes.expert_formats)
        rows.insert(0, (f"experts ({sizes.num_experts} in {formats})", plan.experts_bytes))
    if sizes.disk_table_bytes:
        rows.append(("tables of rows, left on the disk", sizes.disk_table_bytes))
    rows += [
        (f"KV cache, {_tokens_at_once(plan)}", plan.kv_cache_bytes),
        *_state_rows(plan),
        *[("latents of a prompt, expanded", plan.expanded_bytes)] * bool(plan.expanded_bytes),
        *[("draft model and its KV cache", plan.draft_bytes)] * bool(plan.draft_bytes),
        ("activations of a prompt, at most", plan.workspace_bytes),
        ("the program itself", plan.process_bytes + FORWARD_BYTES),
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
    """Return a line about the speed with experts on the disk; without `found`, about the slots."""
    fit = f"from the disk: {slots.share:.0%} of the experts fit"
    if found is None:
        return (
            f"{fit} into {slots.num_slots} slots, the others are read when needed; the "
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


def _tokens_at_once(plan: "Plan") -> str:
    """Return the number of tokens that the KV cache must hold, as text."""
    times = f"{plan.sequences} x " if plan.sequences > 1 else ""
    return f"{times}{plan.context_tokens} tokens"


def _state_rows(plan: "Plan") -> list[tuple[str, int]]:
    """Return the table's rows about the sequences' states; empty for a model without states."""
    if not plan.sizes.state_bytes:
        return []
    rows = [("states", plan.state_bytes)]
    if plan.checkpoint_bytes:
        rows.append(("checkpoints of states, at most", plan.checkpoint_bytes))
    return rows


def _device_line(plan: "Plan") -> str:
    """Return a line about the use of the device's memory, and how much is left free."""
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
            f"decode steps by {speed.rules}; on two GPUs such forecasts of answers were 1.3 to "
            "1.6 times too fast)"
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
