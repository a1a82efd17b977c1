"""An assignment as a planner applies it in one kind of step."""

from collections.abc import Callable, Sequence

from tandem.policy.assignment.problem import Assignment, LayerProblem, Split, added, all_on_cpu
from tandem.policy.cost import CostTable
from tandem.policy.plan import ONCE, TWICE


class Rule:
    """Splits layers: by an assignment, and by what it has found for layers of residents."""

    def __init__(
        self,
        assignment: Assignment,
        *,
        never_worse_than_cpu: bool,
        native: int | None = None,
        fetches: bool = True,
        in_graph: bool = False,
    ) -> None:
        """With `never_worse_than_cpu` the CPU computes all of a layer where that is sooner.

        `native` is its number among those that have a native form. `fetches` tells whether it
        fetches anything: in a step `in_graph`, for a second launch of each layer.
        """
        self.native, self.fetches = native, fetches
        self.launches = (TWICE if fetches else ONCE) if in_graph else 0
        self.assignment = assignment
        self.never_worse_than_cpu = never_worse_than_cpu
        self._of_residents: dict[int, Split] = {}  # by their number

    def dense_seconds(self, costs: CostTable, num_tokens: int, *, asks: bool = False) -> float:
        """Return what passes between the experts of two layers, of which one `asks` the next."""
        launch = costs.second_launch if self.launches == TWICE else 0.0
        return costs.dense(num_tokens) + launch + (costs.asking if asks else 0.0)

    def split(self, problem: LayerProblem) -> Split:
        """Return who computes what."""
        split = self.assignment.assign(problem)
        if self.never_worse_than_cpu:
            surcharge = problem.cpu_first if self.assignment.pipelined else 0.0
            if added(problem.cpu) + surcharge < split.seconds:
                return all_on_cpu(problem, pipelined=self.assignment.pipelined)
        return split

    def split_residents(self, experts: Sequence[int], problem: Callable[[], LayerProblem]) -> Split:
        """Split a layer of residents with one token each, of which only the number matters.

        What copies for other layers cost the CPU meanwhile is left out.
        """
        count = len(experts)
        known = self._of_residents.get(count)
        if known is None:
            known = self.split(problem()._replace(link_busy=0.0))
            self._of_residents[count] = known
        if not known.spill:
            return known
        return known._replace(spill=experts[count - len(known.spill) :])
