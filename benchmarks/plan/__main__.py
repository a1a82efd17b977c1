"""Compares `tandem plan` with real runs: random configurations, each planned and then run.

    python -m benchmarks.plan [--count 300] [--whole 20] [--seed 0] [--only N ...] [--narrow]
    python -m benchmarks.plan --kept FILE             # continues where it was stopped
    python -m benchmarks.plan --speed --count 20      # decode speed too, as a ratio

Each is written as a packed model with random weights, planned by `tandem plan`, and run (loaded,
contexts filled, some tokens decoded) in processes of their own. With a memory limit, both are in
one control group each (needs root). Models are cut to 2 to 4 layers (and their first dense ones);
the last `--whole` have all layers, with as many gigabytes as the disk must hold.

Checked are: each part's bytes; the process's peak memory, within 5 % of the plan; no out-of-memory
in a run that the plan allowed, and no refusal of one that fits. Some configurations also have a
draft model, images, a GGUF file, or experts on the disk. The last line is JSON.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.disk.memory_group import drop_from_page_cache, limited
from benchmarks.plan.draws import Configuration, draw
from benchmarks.plan.found import Found, KeptFinds, figures
from benchmarks.plan.verdict import TOLERANCE, Planned, Taken, differences, memory_ratio

from tandem.experts.store.host_memory import available_bytes

_ENDED_FOR_MEMORY = (-9, 137, 2)  # killed, or refused with a sentence


def check(configuration: Configuration, folder: Path, *, has_speed: bool) -> Found:
    """Plan and run it; return the differences."""
    found, job = Found(configuration.text), Job(configuration, folder)
    if (code := job.write()) != 0:
        found.not_tried = f"not written (exit code {code})"
        return found
    free = job.plan()
    if isinstance(free, int):
        found.wrong.append(f"tandem plan ended with {free}")
        return found
    if (configuration.device_share or 0.0) * free.experts > available_bytes():
        found.not_tried = "its emulated device is larger than this machine's free memory"
        return found
    share = configuration.memory_share
    limit = None if share is None else int(share * free.host)
    planned = free
    given = configuration.device_share or configuration.expert_memory_share
    if limit is not None or given is not None:
        again = job.plan(limit, experts_bytes=free.experts)
        if isinstance(again, int):
            found.wrong.append(f"tandem plan ended with {again} under {limit or 0:,} bytes")
            return found
        planned = again
    drop_from_page_cache(folder)
    taken = job.execute(limit, experts_bytes=free.experts, has_speed=has_speed)
    found.planned = asdict(planned)
    if limit is not None and not isinstance(taken, int) and _ran_against(planned, taken):
        # Mapped experts are dropped and read again if memory is short: a run without a limit shows
        # whether they all fit.
        taken, limit = job.execute(None, experts_bytes=free.experts, has_speed=False), None
    else:
        found.wrong += _of_memory(planned, taken)
    if isinstance(taken, int):
        return found
    found.taken = asdict(taken)
    found.speed_ratio = taken.speed_ratio
    if limit is None:  # otherwise caches take the free memory, and the limit has already shown it
        found.memory_ratio = memory_ratio(planned, taken)
        found.wrong += [one.text for one in differences(planned, taken)]
        if abs(found.memory_ratio - 1) > TOLERANCE:
            found.wrong.append(
                f"memory: planned {planned.host / 1e6:,.0f} MB, taken {taken.peak / 1e6:,.0f}"
            )
    return found


def _ran_against(planned: Planned, taken: Taken) -> bool:
    """Whether it ran in memory although the plan said that it does not fit."""
    is_allowed = planned.fits or planned.slots_over_disk is not None
    return not is_allowed and taken.slots_over_disk is None


def _of_memory(planned: Planned, taken: Taken | int) -> Iterator[str]:
    """Yield errors in the plan's verdict on memory."""
    is_allowed = planned.fits or planned.slots_over_disk is not None
    if isinstance(taken, int):
        if is_allowed or taken not in _ENDED_FOR_MEMORY:
            yield f"the run ended with {taken}, and the plan allowed it"
    elif planned.slots_over_disk is None and is_allowed and taken.slots_over_disk is not None:
        yield f"the plan said that it fits, and {taken.slots_over_disk} experts were in memory"


@dataclass(frozen=True, slots=True)
class Job:
    """The steps of a configuration, each in its own process; a failed step is its exit code."""

    configuration: Configuration
    folder: Path

    def write(self) -> int:
        """Write the model; return the exit code."""
        result = self._run("write", self.configuration)
        return result if isinstance(result, int) else 0

    def plan(self, limit: int | None = None, *, experts_bytes: int = 0) -> Planned | int:
        """Plan it; without the experts' bytes, also without a device."""
        one = self.configuration
        own = one if experts_bytes else dataclasses.replace(one, device_share=None)
        result = self._run("plan", own, limit, experts_bytes=experts_bytes)
        return result if isinstance(result, int) else Planned(**result)

    def execute(self, limit: int | None, *, experts_bytes: int, has_speed: bool) -> Taken | int:
        """Load it and fill its contexts."""
        more = {"experts_bytes": experts_bytes, "has_speed": has_speed}
        result = self._run("execute", self.configuration, limit, **more)
        return result if isinstance(result, int) else Taken(**result)

    def _run(
        self, step: str, configuration: Configuration, limit: int | None = None, **more: Any
    ) -> dict[str, Any] | int:
        words = {"step": step, "folder": str(self.folder), "configuration": asdict(configuration)}
        with limited(limit) as group:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.plan.worker", json.dumps(words | more)],
                capture_output=True, text=True, check=False,
                preexec_fn=None if group is None else group.enter,
            )  # fmt: skip
        if done.returncode:
            print(done.stderr.strip()[-400:], file=sys.stderr)
            return done.returncode
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result


def main() -> None:
    """Check configurations, print each, and the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--whole", type=int, default=0, help="of these, with all layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of a longer run")
    parser.add_argument("--narrow", action="store_true", help="an eighth of the width, no limits")
    parser.add_argument("--speed", action="store_true", help="forecast and measure decode speed")
    parser.add_argument("--kept", type=Path, help="JSON lines of what was found, to go on from")
    flags = parser.parse_args()
    kept = KeptFinds(flags.kept)
    drawn = draw(flags.seed, flags.count, is_narrow=flags.narrow, num_whole=flags.whole)
    found = []
    for one in [drawn[number] for number in flags.only or range(len(drawn))]:
        if (result := kept.of(one)) is None:
            with TemporaryDirectory(prefix="tandem-plan-") as folder:
                result = check(one, Path(folder) / "model", has_speed=flags.speed)
            kept.add(one, result)
        found.append(result)
        print(f"{one.number}: {result.line}", flush=True)
    print(json.dumps(figures(found)))


if __name__ == "__main__":
    main()
