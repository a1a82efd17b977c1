"""Paper 2: hits on the GPU, misses on the CPU; nothing is fetched for the running layer."""

from tandem.policy.assignment.problem import LayerProblem, Split, priced


class HitsOnGpu:
    """Uses what is resident, also where its copy is still under way, and fetches nothing."""

    pipelined = True

    def assign(self, problem: LayerProblem) -> Split:
        """Return the split by residency alone."""
        return priced(problem, (), (), pipelined=True)
