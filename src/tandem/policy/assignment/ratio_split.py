"""Ratio split: sort by t_gpu / t_cpu; the GPU takes the prefix that balances CPU and GPU best.

It is the integral rounding of the linear relaxation of equations 3 to 8.
"""

from tandem.policy.assignment.problem import (
    LayerProblem,
    Split,
    equation_gpu,
    limit_fetches,
    priced,
)


class RatioSplit:
    """Chooses among the prefixes of one order; experts over the fetch limit stay on the CPU."""

    pipelined = False

    def assign(self, problem: LayerProblem) -> Split:
        """Return the best prefix."""
        t_cpu, t_gpu = problem.cpu, equation_gpu(problem)
        order = sorted(range(len(t_gpu)), key=lambda i: t_gpu[i] / t_cpu[i] if t_cpu[i] else 1e99)
        total_gpu, total_cpu = 0.0, sum(t_cpu)
        best, best_end, fetches = total_cpu, 0, 0
        taken: list[int] = []
        for i in order:
            if problem.wait[i] < 0:
                if fetches == problem.max_fetches:
                    continue
                fetches += 1
            taken.append(i)
            total_gpu += t_gpu[i]
            total_cpu -= t_cpu[i]
            if max(total_gpu, total_cpu) < best:
                best, best_end = max(total_gpu, total_cpu), len(taken)
        return priced(problem, *limit_fetches(problem, taken[:best_end]), pipelined=False)
