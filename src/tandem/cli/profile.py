"""`tandem profile`: measures the costs of a model's operations on this machine, and stores them."""

import argparse
import dataclasses
import json
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.cli.model_choice import ModelChoice, add_model, find_model, load_model
from tandem.cli.progress import waiting
from tandem.core.config import add_flags, from_flags, option
from tandem.core.errors import TandemWarning
from tandem.core.units import format_bytes
from tandem.devices.options import OffloadOptions
from tandem.sim.picture import Chart, svg

if TYPE_CHECKING:
    from tandem.policy.cost import DiskCosts, HardwareProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Options of `tandem profile`."""

    expert_dtype: str = option("auto", help="see tandem run --help-all", metavar="DTYPE")
    dense_dtype: str = option("auto", help="see tandem run --help-all", metavar="DTYPE")
    threads: int | None = option(None, help="see tandem run --help-all", metavar="N")
    refresh: bool = option(False, help="measure again even if there is a stored profile")
    picture: str | None = option(None, help="draw the curves to this file", metavar="FILE.svg")
    json: bool = option(False, help="print the profile as one JSON object on the last line")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tandem profile`."""
    add_model(parser, loads=True)
    add_flags(parser, ProfileOptions)


def run(flags: argparse.Namespace) -> int:
    """Measure and print the profile; returns the exit code."""
    options = from_flags(ProfileOptions, flags)
    offload = OffloadOptions(expert_dtype=options.expert_dtype, threads=options.threads)
    choice = find_model(from_flags(ModelChoice, flags), quiet=False)
    model = load_model(choice, offload, quiet=False, dense_dtype=options.dense_dtype)

    begin = time.perf_counter()
    with waiting("measuring the costs of experts"):
        from tandem.experts.measuring.profiler import with_timed_steps
        from tandem.forecast.speed_forecast import PROMPT_TOKENS, time_model
        from tandem.hf.assembly import keep_profile_of, profile_of

        profile = profile_of(model, refresh=options.refresh)
        whole = time_model(model)  # the same steps as in answers; `tandem plan` times them too
        times = whole.prefill_seconds, whole.decode_seconds
        profile = with_timed_steps(profile, PROMPT_TOKENS, *times)
        disk = _disk_of(choice, profile.shapes[0].expert_bytes)
        profile = dataclasses.replace(profile, disk=disk)
        keep_profile_of(model, profile)
    print(table(profile, time.perf_counter() - begin))
    print(
        f"all of it on the CPU: a prompt of {PROMPT_TOKENS} tokens takes {times[0]:.3g} s, then "
        f"{1 / times[1]:.1f} tok/s"
    )
    if options.picture is not None:
        Path(options.picture).write_text(svg(charts(profile)), encoding="utf-8")
    if options.json:
        print(json.dumps(json.loads(profile.to_json())))
    return 0


def _disk_of(choice: ModelChoice, expert_bytes: int) -> "DiskCosts | None":
    """Measure the disk of a model's files; returns None and warns if they cannot be read."""
    from tandem.hardware.disk import measure_disk
    from tandem.hf.checkpoint import open_model

    files = open_model(Path(choice.model), may_run_code=choice.trust_remote_code).weight_files
    try:
        return measure_disk(files, expert_bytes)
    except OSError as error:
        warnings.warn(f"the disk was not measured: {error}", TandemWarning, stacklevel=2)
        return None


def table(profile: "HardwareProfile", seconds: float) -> str:
    """Return the profile as a table; `seconds` is how long the measurement took."""
    shape = profile.shapes[0]
    link = shape.expert_bytes / shape.link_seconds_per_expert / 1e9
    lines = [
        f"{profile.cpu}, {profile.cpu_threads} threads; {shape.shape}: "
        f"{shape.num_moe_layers} layers of {shape.num_experts} experts of "
        f"{format_bytes(shape.expert_bytes)} ({seconds:.1f} s)",
        f"copying one expert {shape.link_seconds_per_expert * 1e6:.0f} us ({link:.1f} GB/s); the "
        f"first expert on the CPU {shape.cpu_first_expert_seconds * 1e6:.0f} us more",
        f"while both work: CPU x {profile.cpu_slowdown_while_copying:.2f}, "
        f"copies x {profile.link_slowdown_while_computing:.2f}",
        f"{'tokens':>8} {'expert on the CPU':>18} {'weights read':>14} {'rest of a layer':>16}",
    ]
    rows = zip(shape.tokens, shape.cpu_seconds, shape.dense_seconds, strict=True)
    for tokens, cpu, dense in rows:
        rate = shape.expert_bytes / cpu / 1e9
        lines.append(f"{tokens:>8} {cpu * 1e6:>15.0f} us {rate:>9.1f} GB/s {dense * 1e6:>13.0f} us")
    if profile.disk is not None:
        lines.append(_disk_line(profile.disk))
    return "\n".join(lines)


def _disk_line(disk: "DiskCosts") -> str:
    rates = " / ".join(f"{rate / 1e9:.2f}" for rate in disk.bytes_per_second)
    depths = " / ".join(map(str, disk.depths))
    return (
        f"the disk under its files, {disk.reads} reads of {format_bytes(disk.piece_bytes)}: "
        f"{rates} GB/s, {depths} at once"
    )


def charts(profile: "HardwareProfile") -> list[Chart]:
    """Return two charts by token count: one expert's microseconds in all, and per token."""
    shape = profile.shapes[0]
    counts = [str(count) for count in shape.tokens]
    copied = [shape.link_seconds_per_expert * 1e6] * len(counts)
    cpu = [seconds * 1e6 for seconds in shape.cpu_seconds]
    each = [seconds * 1e6 / n for seconds, n in zip(shape.cpu_seconds, shape.tokens, strict=True)]
    return [
        Chart("one expert, microseconds", "tokens", counts, {"on the CPU": cpu, "copy": copied}),
        Chart("one expert, microseconds per token", "tokens", counts, {"on the CPU": each}),
    ]
