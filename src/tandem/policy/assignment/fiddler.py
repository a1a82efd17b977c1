"""Fiddler's threshold: each absent expert by itself, where it alone would be done sooner."""

from tandem.policy.assignment.problem import LayerProblem, Split, limit_fetches, priced


class Fiddler:
    """Keeps an absent expert on the CPU if its CPU time is below transfer plus GPU time."""

    pipelined = False

    def assign(self, problem: LayerProblem) -> Split:
        """Return the split expert by expert, without looking at either processor's total."""
        link = problem.link
        on_gpu = [
            i
            for i, wait in enumerate(problem.wait)
            if wait >= 0 or problem.cpu[i] >= problem.gpu[i] + link
        ]
        return priced(problem, *limit_fetches(problem, on_gpu), pipelined=False)
