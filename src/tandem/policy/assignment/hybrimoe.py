"""HybriMoE's hybrid schedule: two pointers walk from the heaviest resident to the lightest absent.

Follows `HSS` of the released code (papers.md 3.1), keyed by expert instead of by list position,
with this machine's costs in place of its constants.
"""

from tandem.policy.assignment.problem import LayerProblem, Split, limit_fetches, priced


class HybriMoe:
    """The front of the list goes to the GPU, its back to the CPU, whichever is done sooner."""

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
