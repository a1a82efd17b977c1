"""One layer's assignment problem, its answers, and the cost of an answer.

There are two cost models. `equation_seconds` is DALI's program (equations 3 to 9): each processor's
time is a sum, and a fetched expert takes max(transfer, computation). `pipeline_seconds` models an
executor: copies run one after another beside the GPU's computation, the first expert on the CPU
costs a surcharge, and CPU and link slow each other down. Experts that are not in memory are read
from a disk one after another: first the CPU's experts, while it computes its other experts, then
the experts to copy.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from tandem.policy.reads import ON_DISK


class LayerProblem(NamedTuple):
    """The active experts of one layer with their times; all sequences are parallel to `experts`."""

    layer: int
    experts: Sequence[int]
    tokens: Sequence[int]
    cpu: Sequence[float]  # CPU seconds
    gpu: Sequence[float]  # GPU seconds, computation only
    wait: Sequence[float]  # seconds until the weights are on the GPU: 0 ready; negative: absent
    scores: Sequence[float]  # of the eviction policy; they break ties among fetches
    cpu_first: float  # added for the first expert on the CPU
    link: float  # seconds to copy one expert
    link_busy: float  # seconds until the link can start a new copy
    max_fetches: int  # equation 9: how many absent experts may be fetched
    cpu_slowdown: float = 1.0  # factor on CPU seconds while the link is busy
    # Factor contained in `link`, which does not apply if the CPU computes no experts.
    link_slowdown: float = 1.0
    # Time that the copying thread needs before and after a fetch in one graph.
    copy_wake: float = 0.0
    read: float = 0.0  # seconds to read one expert from a disk
    places: Sequence[int] = ()
    """Where each expert is, if the model runs from the disk (`tandem.policy.reads`). Empty: all
    are in memory."""

    def is_on_disk(self, i: int) -> bool:
        """Tell whether the expert at a position must be read from the disk before use or copy."""
        return bool(self.places) and self.places[i] == ON_DISK


class Split(NamedTuple):
    """An answer: absent experts to fetch, in copy order, and resident ones that the CPU computes.

    All other resident experts run on the GPU, all other absent experts on the CPU. The seconds
    follow the policy's cost model.
    """

    fetch: Sequence[int]
    spill: Sequence[int]
    gpu_seconds: float
    cpu_seconds: float

    @property
    def seconds(self) -> float:
        """The seconds until both processors are done."""
        return max(self.gpu_seconds, self.cpu_seconds)


class Assignment(Protocol):
    """Decides which processor computes each active expert; must be deterministic and stateless."""

    pipelined: bool  # the cost model that it minimises

    def assign(self, problem: LayerProblem) -> Split:
        """Return the split; it must fetch at most `max_fetches` absent experts, each once."""


def added(seconds: Iterable[float]) -> float:
    """Add numbers one by one, as native code does; `sum` rounds differently from Python 3.12 on."""
    total = 0.0
    for one in seconds:
        total += one
    return total


def computed_as_read(problem: LayerProblem, on_cpu: Iterable[int]) -> tuple[float, float]:
    """Return the CPU seconds of experts that a disk reads in this order, and when the CPU is done.

    The CPU computes each expert once it is read. "Done" assumes that the CPU computes nothing else.
    """
    total = done = end = 0.0
    for i in on_cpu:
        end += problem.read
        total += problem.cpu[i]
        done = (end if end > done else done) + problem.cpu[i]
    return total, done


def longest_first(problem: LayerProblem, on_cpu: Iterable[int]) -> list[int]:
    """Return the positions `on_cpu`, longest CPU time first: the disk's order of reads."""
    return sorted(on_cpu, key=lambda i: -problem.cpu[i])


def equation_gpu(problem: LayerProblem) -> list[float]:
    """Return each expert's t_gpu (equations 5 and 6); a copy under way takes its remaining time."""
    link = problem.link
    return [
        gpu if wait == 0 else max(link if wait < 0 else wait, gpu)
        for gpu, wait in zip(problem.gpu, problem.wait, strict=True)
    ]


def by_processor(
    problem: LayerProblem, fetch: Sequence[int], spill: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Return the positions of residents on the GPU, fetches in order, and experts on the CPU."""
    place = {expert: i for i, expert in enumerate(problem.experts)}
    fetched = [place[expert] for expert in fetch]
    moved = {*fetched, *(place[expert] for expert in spill)}
    on_gpu = [i for i, wait in enumerate(problem.wait) if wait >= 0 and i not in moved]
    taken = {*on_gpu, *fetched}
    return on_gpu, fetched, [i for i in range(len(problem.experts)) if i not in taken]


def equation_seconds(
    problem: LayerProblem, fetch: Sequence[int], spill: Sequence[int]
) -> tuple[float, float]:
    """Return (T_gpu, T_cpu) of equations 4 to 6."""
    on_gpu, fetched, on_cpu = by_processor(problem, fetch, spill)
    gpu = equation_gpu(problem)
    return sum(gpu[i] for i in on_gpu + fetched), sum(problem.cpu[i] for i in on_cpu)


def pipeline_seconds(
    problem: LayerProblem, fetch: Sequence[int], spill: Sequence[int]
) -> tuple[float, float]:
    """Return when the GPU and the CPU end if copies overlap with computation."""
    on_gpu, fetched, on_cpu = by_processor(problem, fetch, spill)
    wait, gpu = problem.wait, problem.gpu
    link = problem.link if on_cpu else problem.link / problem.link_slowdown
    coming = longest_first(problem, filter(problem.is_on_disk, on_cpu))
    done = sum(gpu[i] for i in on_gpu if wait[i] == 0)
    for i in sorted((i for i in on_gpu if wait[i] > 0), key=wait.__getitem__):
        done = max(done, wait[i]) + gpu[i]
    copied, read = problem.link_busy, len(coming) * problem.read
    for i in fetched:
        if problem.is_on_disk(i):
            read += problem.read
            copied = max(copied, read)
        copied += link
        done = max(done, copied) + gpu[i]
    if not on_cpu:
        return done, 0.0
    cpu = problem.cpu_first + sum(problem.cpu[i] for i in on_cpu if i not in coming)
    cpu += (problem.cpu_slowdown - 1.0) * min(cpu, problem.link_busy + len(fetched) * link)
    as_read, alone = computed_as_read(problem, coming)
    return done, max(cpu + as_read, alone)


def priced(
    problem: LayerProblem, fetch: Sequence[int], spill: Sequence[int], *, pipelined: bool
) -> Split:
    """Return the split with its times: `pipeline_seconds` if `pipelined`, else equations 4 to 6."""
    seconds = pipeline_seconds if pipelined else equation_seconds
    return Split(fetch, spill, *seconds(problem, fetch, spill))


def all_on_cpu(problem: LayerProblem, *, pipelined: bool) -> Split:
    """Return the split that leaves every active expert to the CPU."""
    resident = [e for e, wait in zip(problem.experts, problem.wait, strict=True) if wait >= 0]
    everyone = range(len(problem.experts))
    coming = longest_first(problem, filter(problem.is_on_disk, everyone))
    cpu = added(problem.cpu[i] for i in everyone if i not in coming)
    cpu += problem.cpu_first if pipelined else 0.0
    as_read, alone = computed_as_read(problem, coming)
    return Split((), resident, 0.0, max(cpu + as_read, alone))


def limit_fetches(problem: LayerProblem, on_gpu: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return (fetch, spill) if the GPU computes the experts at positions `on_gpu`.

    Fetches over the limit are dropped, which leaves their experts to the CPU.
    """
    kept = set(on_gpu)
    fetch = [problem.experts[i] for i in on_gpu if problem.wait[i] < 0][: problem.max_fetches]
    spill = [e for i, e in enumerate(problem.experts) if problem.wait[i] >= 0 and i not in kept]
    return fetch, spill
