"""DALI's Algorithm 1, greedy assignment: experts whose CPU and GPU times differ most come first."""

from tandem.policy.assignment.problem import (
    LayerProblem,
    Split,
    equation_gpu,
    limit_fetches,
    priced,
)


class Dali:
    """Gives each expert, by descending |t_gpu - t_cpu|, to whichever processor finishes sooner."""

    pipelined = False

    def assign(self, problem: LayerProblem) -> Split:
        """Return Algorithm 1's answer; equation 9, which it does not look at, is applied after."""
        t_cpu, t_gpu = problem.cpu, equation_gpu(problem)
        by_difference = sorted(range(len(t_gpu)), key=lambda i: -abs(t_gpu[i] - t_cpu[i]))
        total_cpu = total_gpu = 0.0
        on_gpu = []
        for i in by_difference:
            if total_gpu + t_gpu[i] <= total_cpu + t_cpu[i]:
                on_gpu.append(i)
                total_gpu += t_gpu[i]
            else:
                total_cpu += t_cpu[i]
        return priced(problem, *limit_fetches(problem, on_gpu), pipelined=False)
