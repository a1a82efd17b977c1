"""Everything on the CPU: the simplest assignment, and the bound that no plan may exceed."""

from tandem.policy.assignment.problem import LayerProblem, Split, all_on_cpu


class CpuOnly:
    """Leaves every expert to the CPU."""

    pipelined = True

    def assign(self, problem: LayerProblem) -> Split:
        """Return the split that uses neither GPU nor link."""
        return all_on_cpu(problem, pipelined=True)
