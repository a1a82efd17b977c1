"""llama.cpp and KTransformers: a whole MoE layer runs where its experts lie, never on both sides.

llama.cpp streams the experts of CPU layers through the GPU when many tokens come at once.
"""

from tandem.policy.assignment.problem import LayerProblem, Split, all_on_cpu, limit_fetches, priced


class LayerStatic:
    """Runs a layer on the GPU if all of its active experts are resident, else on the CPU."""

    pipelined = True

    def __init__(self, *, stream_from: int | None = None) -> None:
        """Stream absent experts through the GPU from `stream_from` (token, expert) pairs on."""
        self.stream_from = stream_from

    def assign(self, problem: LayerProblem) -> Split:
        """Return the split that keeps the layer in one place."""
        if min(problem.wait) >= 0:
            return priced(problem, (), (), pipelined=True)
        if self.stream_from is not None and sum(problem.tokens) >= self.stream_from:
            order = range(len(problem.experts))
            return priced(problem, *limit_fetches(problem, order), pipelined=True)
        return all_on_cpu(problem, pipelined=True)
