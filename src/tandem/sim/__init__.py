"""The planner on a virtual clock: replays of routing traces, the exact optimum, Belady's bound."""

from tandem.policy.assignment import ASSIGNMENTS
from tandem.sim.exact import Exact

__all__ = ["Exact"]

# The oracle needs numpy, so it is not part of `policy`; it joins the names when `sim` is imported.
ASSIGNMENTS.register("exact")(Exact)
