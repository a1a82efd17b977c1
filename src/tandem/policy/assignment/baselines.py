"""Baselines for `balanced`: the rules of papers and other systems, and simple rules.

A rule that is named after a paper or system follows that paper or system.
"""

from tandem.policy.assignment.problem import (
    LayerProblem,
    Split,
    all_on_cpu,
    equation_gpu,
    limit_fetches,
    priced,
)


class CpuOnly:
    """Leaves every expert to the CPU: the simplest rule; no useful plan takes longer."""

    pipelined = True

    def assign(self, problem: LayerProblem) -> Split:
        """Return the split that uses neither GPU nor link."""
        return all_on_cpu(problem, pipelined=True)


class GpuOnly:
    """Fetches every absent expert, heaviest first: what plain expert offloading does."""

    pipelined = True

    def assign(self, problem: LayerProblem) -> Split:
        """Return the split with nothing on the CPU, as far as the limit of fetches allows."""
        order = sorted(range(len(problem.experts)), key=lambda i: -problem.tokens[i])
        return priced(problem, *limit_fetches(problem, order), pipelined=True)


class HitsOnGpu:
    """Paper 2 (papers.md): hits, even those being copied, on the GPU; misses on the CPU."""

    pipelined = True

    def assign(self, problem: LayerProblem) -> Split:
        """Return the split by residency alone; nothing is fetched for this layer."""
        return priced(problem, (), (), pipelined=True)


class LayerStatic:
    """llama.cpp and KTransformers: a layer runs on the GPU if all of its active experts are there.

    llama.cpp streams the experts of CPU layers through the GPU if a step has many tokens.
    """

    pipelined = True

    def __init__(self, *, stream_from: int | None = None) -> None:
        """Stream a layer through the GPU from `stream_from` routed tokens on; None: never."""
        self.stream_from = stream_from

    def assign(self, problem: LayerProblem) -> Split:
        """Return the split that keeps the layer on one processor."""
        if min(problem.wait) >= 0:
            return priced(problem, (), (), pipelined=True)
        if self.stream_from is not None and sum(problem.tokens) >= self.stream_from:
            order = range(len(problem.experts))
            return priced(problem, *limit_fetches(problem, order), pipelined=True)
        return all_on_cpu(problem, pipelined=True)


class Fiddler:
    """Keeps an absent expert on the CPU if its CPU time is below transfer plus GPU time."""

    pipelined = False

    def assign(self, problem: LayerProblem) -> Split:
        """Return the split, decided for each expert alone: no processor's total is considered."""
        link = problem.link
        on_gpu = [
            i
            for i, wait in enumerate(problem.wait)
            if wait >= 0 or problem.cpu[i] >= problem.gpu[i] + link
        ]
        return priced(problem, *limit_fetches(problem, on_gpu), pipelined=False)


class Dali:
    """Assigns experts, by descending |t_gpu - t_cpu|, to the processor that would end sooner.

    This is DALI's Algorithm 1.
    """

    pipelined = False

    def assign(self, problem: LayerProblem) -> Split:
        """Return Algorithm 1's split, to which the limit of fetches is applied afterwards."""
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


class RatioSplit:
    """Sorts experts by t_gpu / t_cpu; the GPU takes the prefix that balances both processors best.

    This rounds the linear relaxation of DALI's equations 3 to 8 to integers. Experts over the fetch
    limit stay on the CPU.
    """

    pipelined = False

    def assign(self, problem: LayerProblem) -> Split:
        """Return the split whose later processor ends soonest; the GPU computes a prefix."""
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


class HybriMoe:
    """HybriMoE: two pointers start at the heaviest resident and the lightest absent expert.

    They move towards each other until they meet. In each round the front expert goes to the GPU or
    the back expert to the CPU, whichever ends sooner. Follows `HSS` of the released code (papers.md
    3.1), but keyed by expert instead of list position, and with this machine's costs in place of
    the code's constants.
    """

    pipelined = True

    def assign(self, problem: LayerProblem) -> Split:
        """Return the two-pointer schedule; an absent expert at the front waits for its copy."""
        wait, tokens = problem.wait, problem.tokens
        order = sorted(range(len(tokens)), key=lambda i: (wait[i] < 0, -tokens[i]))
        gpu_total = cpu_total = move_total = 0.0
        on_gpu: list[int] = []
        front, back = 0, len(order) - 1
        while front <= back:
            i, j = order[front], order[back]
            gpu_seconds = problem.gpu[i]
            if wait[i] < 0:
                gpu_seconds += max(0.0, move_total + problem.link - gpu_total)
            cpu_seconds = problem.cpu[j] + (problem.cpu_first if cpu_total == 0.0 else 0.0)
            if gpu_total + gpu_seconds <= cpu_total + cpu_seconds:
                on_gpu.append(i)
                gpu_total += gpu_seconds
                move_total += problem.link if wait[i] < 0 else 0.0
                front += 1
            else:
                cpu_total += cpu_seconds
                back -= 1
        return priced(problem, *limit_fetches(problem, on_gpu), pipelined=True)
