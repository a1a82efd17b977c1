"""Everything on the GPU, absent experts on demand: what plain expert offloading does."""

from tandem.policy.assignment.problem import LayerProblem, Split, limit_fetches, priced


class GpuOnly:
    """Fetches every absent expert, heaviest first, as far as equation 9 allows."""

    pipelined = True

    def assign(self, problem: LayerProblem) -> Split:
        """Return the split that leaves nothing to the CPU."""
        order = sorted(range(len(problem.experts)), key=lambda i: -problem.tokens[i])
        return priced(problem, *limit_fetches(problem, order), pipelined=True)
