"""The replays that the tables share: each system once, under the papers' own conditions.

A trace is cut into pieces of a prompt and an answer, as in DALI: 64 tokens at once, then 64 steps.
A fifth of the pieces is held out; systems that start with popular experts learn from it.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise

import numpy as np
from benchmarks.papers.table import over
from benchmarks.policy.routings import taken

from tandem.hardware.profiles import load_profile
from tandem.policy.cost import NO_HOST, HardwareProfile
from tandem.policy.plan import Geometry
from tandem.sim.replay import Tally
from tandem.sim.simulation import Conditions, run_timed
from tandem.sim.systems import SimulatedSettings, System, systems
from tandem.trace import RoutingTrace

Measure = Callable[[Tally], float | None]
BATCHES = (8, 16, 32, 64)  # DALI's, up to what the traces have sequences for
DALI_MACHINE = load_profile("dali-testbed")
RELEASED = System(
    "hybrimoe, released",
    SimulatedSettings(
        assignment="hybrimoe-released", eviction="hybrimoe-released", never_worse_than_cpu=False
    ),
    "random",
)


def pieces(trace: RoutingTrace, length: int) -> RoutingTrace:
    """Return the sequences cut into pieces of this many tokens; the rest of each is dropped."""
    spans = pairwise(trace.seq_offsets.tolist())
    starts = [at for start, end in spans for at in range(start, end - length + 1, length)]
    return taken(trace, [np.arange(at, at + length) for at in starts])


def with_perfect_hints(trace: RoutingTrace) -> RoutingTrace:
    """Return a trace in which DALI's predictor names exactly what each router chooses next."""
    meta = dataclasses.replace(trace.meta, predictors=("residual",))
    return dataclasses.replace(trace, meta=meta, predicted=trace.experts[:, :, None])


def plain(assignment: str, eviction: str = "static", start: str = "random") -> System:
    """Return a system of two policies, without prefetch and without Tandem's safeguard."""
    settings = SimulatedSettings(
        assignment=assignment, eviction=eviction, never_worse_than_cpu=False
    )
    return System(f"{assignment} and {eviction}", settings, start)


class Replays:
    """Traces by name, and their replays so far."""

    def __init__(
        self,
        traces: Mapping[str, RoutingTrace],
        *,
        prompt: int = 64,
        generated: int = 64,
        tokens: int = 4096,
        most: int = 64,
    ) -> None:
        """Replay `tokens` tokens or one batch, whichever is more; no batch is above `most`."""
        self.traces = dict(traces)
        self.prompt, self.generated = prompt, generated
        self.tokens = tokens
        self.most = most
        self._known: dict[object, Tally] = {}

    def longer(self) -> "Replays":
        """Return replays of half the prompt and seven times the answer."""
        return Replays(
            self.traces,
            prompt=self.prompt // 2,
            generated=7 * self.generated,
            tokens=self.tokens,
            most=self.most,
        )

    def batches(self) -> list[int]:
        """Return the batch sizes."""
        return [batch for batch in BATCHES if batch <= self.most] or [self.most]

    def geometry(self, name: str) -> Geometry:
        """Return a trace's geometry."""
        return self.traces[name].meta.geometry

    def system(self, name: str, which: str) -> System:
        """Return a system of the papers for a trace's model."""
        known = {system.name: system for system in systems(self.geometry(name))}
        return (known | {RELEASED.name: RELEASED})[which]

    def pieces(self, name: str, *, has_hints: bool = False) -> RoutingTrace:
        """Return a trace in pieces."""
        trace = pieces(self.traces[name], self.prompt + self.generated)
        return with_perfect_hints(trace) if has_hints else trace

    def tally(
        self,
        name: str,
        system: System,
        *,
        batch: int,
        gpu_experts: float = 0.5,
        profile: HardwareProfile = DALI_MACHINE,
        has_hints: bool = False,
    ) -> Tally | None:
        """Return a replay's totals; None if the trace has too few pieces for the batch."""
        batch = min(batch, self.most)
        trace = self.pieces(name, has_hints=has_hints)
        held = trace.num_sequences // 5
        if trace.num_sequences - held < batch:
            return None
        key = (name, system, batch, gpu_experts, profile, has_hints)
        if key not in self._known:
            where = f"{name}, {profile.name}, batch {batch}, {gpu_experts:.0%}"
            print(f"{where}: {system.name}", file=sys.stderr, flush=True)
            conditions = self.conditions(batch, gpu_experts, profile)
            conditions = dataclasses.replace(conditions, start=system.start, hold_out=held)
            self._known[key] = run_timed(trace, system.settings, conditions)
        return self._known[key]

    def conditions(
        self, batch: int, gpu_experts: float = 0.5, profile: HardwareProfile = DALI_MACHINE
    ) -> Conditions:
        """Return the constant conditions of a replay."""
        return Conditions(
            profile=profile,
            gpu_experts=gpu_experts,
            batch=batch,
            prompt=self.prompt,
            limit=max(self.tokens, batch * (self.prompt + self.generated)),
            compare_every=0,
            host_path=NO_HOST,
        )

    def ratio(
        self,
        name: str,
        system: System,
        base: System,
        measure: Measure,
        *,
        batch: int,
        gpu_experts: float = 0.5,
        has_hints: tuple[bool, bool] = (False, False),
    ) -> float | None:
        """Return one system's measure over another's; None if one of them is unknown."""
        values = []
        for which, hinted in zip((system, base), has_hints, strict=True):
            tally = self.tally(name, which, batch=batch, gpu_experts=gpu_experts, has_hints=hinted)
            values.append(None if tally is None else measure(tally))
        return over(values[0], values[1])
