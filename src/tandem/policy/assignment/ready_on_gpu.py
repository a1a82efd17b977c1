"""A captured decode step: the GPU computes what it has when the layer runs, the CPU the rest.

Nothing is fetched for the layer that runs, and an expert whose copy is under way is a miss: the
device looks each expert up in a table that lists what is complete.
"""

from tandem.policy.assignment.problem import LayerProblem, Split


class ReadyOnGpu:
    """Uses what is complete, and fetches nothing."""

    pipelined = True

    def assign(self, problem: LayerProblem) -> Split:
        """Return the split by residency alone."""
        gpu = cpu = 0.0
        spill = []
        for i, wait in enumerate(problem.wait):  # native code adds up in this order
            if wait == 0.0:
                gpu += problem.gpu[i]
                continue
            cpu += problem.cpu[i]
            if wait > 0.0:
                spill.append(problem.experts[i])
        if any(problem.wait):
            cpu += problem.cpu_first
        return Split((), spill, gpu, cpu)
