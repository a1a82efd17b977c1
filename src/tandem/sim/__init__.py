"""The planner on a virtual clock: replays of routing traces, the exact optimum, Belady's bound."""

from tandem.policy.assignment import ASSIGNMENTS
from tandem.sim import baselines
from tandem.sim.exact import Exact
from tandem.sim.exact_overlapped import ExactOverlapped

__all__ = ["Exact", "ExactOverlapped", "baselines"]

# Oracles need numpy, so they are not part of `policy`; they join the names when `sim` is imported.
ASSIGNMENTS.register("exact")(Exact)
ASSIGNMENTS.register("exact-overlapped")(ExactOverlapped)
