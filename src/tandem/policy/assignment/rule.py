"""Applies an assignment to the layers of planned steps, or to those of steps in one graph."""

from collections.abc import Callable, Sequence

from tandem.policy.assignment.problem import Assignment, LayerProblem, Split, all_on_cpu
from tandem.policy.cost import CostTable
from tandem.policy.plan import ONCE, TWICE


class Rule:
    """Splits layers with an assignment; reuses splits for resident experts with one token each."""

    def __init__(
        self,
        assignment: Assignment,
        *,
        never_worse_than_cpu: bool,
        native: int | None = None,
        fetches: bool = True,
        in_graph: bool = False,
    ) -> None:
        """Store an assignment and how it is applied.

        With `never_worse_than_cpu`, the CPU computes a whole layer if that ends sooner. `native` is
        the assignment's number if it has a native form. `fetches` says whether the assignment ever
        fetches; if so, each layer of a step `in_graph` has a second launch.
        """
        self.native, self.fetches = native, fetches
        self.launches = (TWICE if fetches else ONCE) if in_graph else 0
        self.assignment = assignment
        self.never_worse_than_cpu = never_worse_than_cpu
        self._of_residents: dict[int, Split] = {}  # number of residents -> split

    def dense_seconds(self, costs: CostTable, num_tokens: int, *, asks: bool = False) -> float:
        """Return the seconds from one layer's experts to the next layer's experts.

        With `asks`, the time to run the next layer's router ahead is included.
        """
        launch = costs.second_launch if self.launches == TWICE else 0.0
        return costs.dense(num_tokens) + launch + (costs.asking if asks else 0.0)

    def split(self, problem: LayerProblem) -> Split:
        """Return which processor computes each expert."""
        split = self.assignment.assign(problem)
        if self.never_worse_than_cpu:
            alone = all_on_cpu(problem, pipelined=self.assignment.pipelined)
            if alone.seconds < split.seconds:
                return alone
        return split

    def split_residents(self, experts: Sequence[int], problem: Callable[[], LayerProblem]) -> Split:
        """Split a layer of resident experts with one token each; only the experts' number matters.

        Copies under way for other layers are assumed not to slow the CPU down.
        """
        count = len(experts)
        known = self._of_residents.get(count)
        if known is None:
            known = self.split(problem()._replace(link_busy=0.0))
            self._of_residents[count] = known
        if not known.spill:
            return known
        return known._replace(spill=experts[count - len(known.spill) :])
