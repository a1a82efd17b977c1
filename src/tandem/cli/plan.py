"""`tandem plan`: what goes where, how many bytes and how fast, before anything is loaded."""

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.cli.models import ModelChoice, add_model, calm_transformers, find_model
from tandem.cli.paths import cache_dir
from tandem.core.config import add_flags, from_flags, option, require_range
from tandem.core.units import format_bytes
from tandem.offload.options import OffloadOptions

if TYPE_CHECKING:
    from tandem.bench.model_plan import Plan
    from tandem.hf.sizes import ModelSizes

# What advice is given about, largest first.
_OTHER_FORMATS = ("int8", "int4")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What `tandem plan` is told beside the options of offloading."""

    dense_dtype: str = option("auto", help="as in tandem run", metavar="DTYPE")
    context: int = option(4096, help="tokens of a conversation", metavar="N")
    measure: bool = option(
        True, help="forecast the speed, measured once on a few layers with random weights"
    )
    refresh: bool = option(False, help="measure anew, also where a forecast is kept")
    json: bool = option(False, help="last line of standard output: one JSON object")

    def __post_init__(self) -> None:
        """Check the ranges."""
        require_range("context", self.context, 1, what="a number of tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tandem plan`."""
    add_model(parser)
    add_flags(parser, PlanOptions)
    add_flags(parser, OffloadOptions)


def run(flags: argparse.Namespace) -> int:
    """Forecast and print; returns the exit code: 0 also for a model that does not fit."""
    options = from_flags(PlanOptions, flags)
    offload = from_flags(OffloadOptions, flags)
    source = find_model(from_flags(ModelChoice, flags), quiet=True)
    calm_transformers(quiet=True)

    from tandem.bench.model_plan import advice, as_json

    plan, others = _plan(source, options, offload)
    lines = advice(plan, others)
    print(_table(plan))
    for line in lines:
        print(f"- {line}")
    if options.json:
        print(json.dumps(as_json(plan, lines)))
    return 0


def _plan(
    source: ModelChoice, options: PlanOptions, offload: OffloadOptions
) -> "tuple[Plan, dict[str, ModelSizes]]":
    from tandem.bench.model_plan import Plan, plan_slots
    from tandem.bench.speed_forecast import forecast_speed
    from tandem.generate.generator import Generator  # noqa: F401  its modules are part of a run
    from tandem.hf.checkpoint import open_checkpoint
    from tandem.hf.config import OffloadConfig
    from tandem.hf.sizes import gguf_sizes, model_sizes
    from tandem.offload.device import DeviceMemory
    from tandem.offload.host_memory import available_bytes, process_bytes

    path = Path(source.model)
    checkpoint = None
    if path.is_dir():  # else it is a GGUF file
        checkpoint = open_checkpoint(path, may_run_code=source.trust_remote_code)

    def config(expert_dtype: str) -> OffloadConfig:
        return OffloadConfig(
            expert_dtype=expert_dtype, dense_dtype=options.dense_dtype, threads=offload.threads,
            isa=os.environ.get("TANDEM_ISA"),
        )  # fmt: skip

    def sizes_as(expert_dtype: str) -> "ModelSizes":
        if checkpoint is None:
            return gguf_sizes(path, config(expert_dtype))
        return model_sizes(checkpoint, config(expert_dtype))

    is_packed = checkpoint is not None and checkpoint.is_packed
    process, available = process_bytes(), available_bytes()
    sizes = sizes_as(offload.expert_dtype)
    others = {} if is_packed else {name: sizes_as(name) for name in _OTHER_FORMATS}
    memory = DeviceMemory(available, available)
    slots, gpu_bytes = plan_slots(
        sizes, device=offload.device, gpu_memory=offload.gpu_memory, memory=memory,
        kv_cache_bytes=options.context * sizes.kv_bytes_per_token,
    )  # fmt: skip
    speed = "it was not asked for"
    forecast = None
    if options.measure:
        if offload.device == "cpu":
            forecast = forecast_speed(
                sizes, config(offload.expert_dtype), cache_dir=cache_dir(), refresh=options.refresh
            )
        else:
            speed = "it is forecast for device cpu only"
    plan = Plan(
        sizes=sizes,
        context_tokens=options.context,
        process_bytes=process,
        available_bytes=available,
        device=offload.device,
        gpu_bytes=gpu_bytes,
        expert_slots=slots,
        speed=forecast or speed,
        can_be_packed=checkpoint is not None and not is_packed,
    )
    return plan, others


def _table(plan: "Plan") -> str:
    """Return the plan for people."""
    from tandem.bench.model_plan import CONTEXTS

    sizes = plan.sizes
    formats = ", ".join(sizes.expert_formats)
    rows = [(f"experts ({sizes.num_experts} in {formats})", sizes.experts_bytes)]
    rows += [(part, num_bytes) for part, num_bytes in sizes.dense_bytes.items()]
    rows += [
        (f"KV cache, {plan.context_tokens} tokens", plan.kv_cache_bytes),
        ("activations of a prompt, at most", plan.workspace_bytes),
        ("the program itself", plan.process_bytes),
    ]
    lines = [f"{name:<42} {format_bytes(num_bytes):>10}" for name, num_bytes in rows]
    verdict = "fits" if plan.fits else "does not fit"
    free = format_bytes(plan.available_bytes + plan.process_bytes)
    lines.append(f"{'host memory':<42} {format_bytes(plan.host_bytes):>10}  {verdict}: {free} free")
    by_context = ", ".join(
        f"{tokens // 1024}k {format_bytes(tokens * sizes.kv_bytes_per_token)}"
        for tokens in CONTEXTS
    )
    lines.append(f"KV cache by context: {by_context}")
    if plan.device != "cpu":
        lines.append(
            f"{plan.device}: {plan.expert_slots} of {sizes.num_experts} experts in "
            f"{format_bytes(plan.gpu_bytes['experts'])}, dense parts "
            f"{format_bytes(plan.gpu_bytes['dense'])}"
        )
    if isinstance(plan.speed, str):
        lines.append(f"speed: {plan.speed}")
    else:
        speed = plan.speed
        how = (
            "whole" if speed.measured_layers >= sizes.num_layers else f"on {speed.measured_layers}"
        )
        lines.append(
            f"speed: first token of {speed.prompt_tokens} after {speed.prefill_seconds:.2f} s "
            f"({speed.prefill_tokens_per_second:.0f} tok/s), then "
            f"{speed.decode_tokens_per_second:.1f} tok/s (measured {how} of {sizes.num_layers} "
            "layers with random weights)"
        )
    return "\n".join(lines)
