"""Every decision of a simulation as JSON lines, so that other programs can recompute its numbers.

The first line is the header: settings, slots and costs. The other lines are in time order:
- `"run": "demand"`: one line per layer of the hit-rate replay: active `experts`, `hits` among
  them, `changes` as [newcomer, victim or null]. hit_rate = sum of hits / sum of experts. `rule`:
  the rule that the layer's eviction followed, if the policy chooses among several. Timed lines
  have it too.
- `"run": "timed"`: one line per layer on the virtual clock: `experts`, `tokens`, `wait` (seconds
  until an expert's weights are on the GPU: 0 resident, null absent), the plan (`gpu`, `arriving`,
  `fetch`, `cpu`, `insert`, `prefetch`; copies as [layer, expert, slot, evicted or null], evicted
  as [layer, expert]) and `equations`: the policy's answer under equations 3 to 9 alone (`gpu`: the
  experts on the GPU) with the optimum's seconds where it was computed. Seconds of equations are
  max(sum of t_cpu, sum of t_gpu); t_gpu = max(transfer or wait, computation).
"""

import json
from collections.abc import Sequence
from typing import TextIO

from tandem.policy.plan import Copy, Geometry, LayerLoad, LayerPlan
from tandem.sim.replay import Compared


class Dump:
    """Writes a simulation's decisions as JSON lines."""

    def __init__(self, stream: TextIO, geometry: Geometry) -> None:
        """Write to `stream`; `geometry` is the model's."""
        self._stream = stream
        self._geometry = geometry

    def header(self, **values: object) -> None:
        """Write the header: a format number and `values`."""
        self._write({"format": 1, **values})

    def demand(
        self, load: LayerLoad, hits: Sequence[int], changes: list[tuple[int, int]], rule: str
    ) -> None:
        """Write the line of one layer of the hit-rate replay."""
        name = self._geometry.expert_id
        self._write(
            {
                "run": "demand",
                "layer": load.layer,
                "experts": load.experts,
                "hits": hits,
                "changes": [[name(new), None if old < 0 else name(old)] for new, old in changes],
                "rule": rule,
            }
        )

    def plan(
        self,
        step: int,
        load: LayerLoad,
        plan: LayerPlan,
        compared: Compared,
        rule: str,
        seconds: float,
    ) -> None:
        """Write the line of one layer of the timed replay."""
        problem, split, optimal = compared
        placed = zip(load.experts, problem.wait, strict=True)
        on_gpu = [
            e for e, wait in placed if e in split.fetch or (wait >= 0 and e not in split.spill)
        ]
        self._write(
            {
                "run": "timed",
                "step": step,
                "seconds": seconds,
                "layer": load.layer,
                "experts": load.experts,
                "tokens": load.tokens,
                "wait": [None if wait < 0 else wait for wait in problem.wait],
                "gpu": plan.gpu,
                "arriving": plan.arriving,
                "fetch": _copies(plan.fetch),
                "cpu": plan.cpu,
                "insert": _copies(plan.insert),
                "prefetch": _copies(plan.prefetch),
                "rule": rule,
                "equations": {"gpu": on_gpu, "optimal_seconds": optimal},
            }
        )

    def _write(self, value: dict[str, object]) -> None:
        self._stream.write(json.dumps(value) + "\n")


def _copies(copies: tuple[Copy, ...]) -> list[list[object]]:
    return [[copy.layer, copy.expert, copy.slot, copy.evicts] for copy in copies]
