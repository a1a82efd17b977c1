"""Chooses the processors for the CPU threads from Linux's files.

There is one thread per fast core. Two hyper-threads share a core's multipliers. All threads of a
product wait for the slowest thread, so a thread on a slow core would delay the threads on fast
cores.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.hardware.cgroups import processor_quota, read_number, read_text

ROOT = Path("/")
# A core is slow if it has less than this share of the fastest core's capacity.
_FAST_SHARE = 0.7
_CPUS = Path("sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class Topology:
    """The processors that a process may use, by Linux's numbers."""

    usable: tuple[int, ...]
    cores: tuple[int, ...]
    """One usable processor for each physical core."""
    fast_cores: tuple[int, ...]
    """The processors in `cores` that are not much slower than the fastest."""
    quota: float | None = None
    """The number of processors that a container may use at once; None: no limit."""

    @property
    def num_threads(self) -> int:
        """The default number of threads: one per fast core, but at most a container's limit."""
        fast = len(self.fast_cores)
        return fast if self.quota is None else max(1, min(fast, int(self.quota)))

    def threads_beside(self, others: int) -> int:
        """Return the default number of threads where `others` other threads of the program spin.

        A thread that another one displaces delays all that compute with it. So the others get
        processors of their own, but at most a quarter of all.
        """
        limit = len(self.usable) if self.quota is None else int(self.quota)
        limit = max(1, min(len(self.usable), limit))
        return min(self.num_threads, limit - min(others, limit // 4))

    def places(self, num_threads: int) -> tuple[int, ...]:
        """Return the processors on which `num_threads` threads may run.

        These are the fast cores if they are enough, else all cores, else all usable processors.
        """
        fitting = (p for p in (self.fast_cores, self.cores) if num_threads <= len(p))
        return next(fitting, self.usable)

    def describe(self) -> str:
        """Return a phrase: numbers of cores, default number of threads, and why so many threads."""
        text = f"{len(self.cores)} physical, {len(self.usable)} logical"
        threads = f"{self.num_threads} thread{'s' * (self.num_threads > 1)}"
        if self.quota is not None and self.quota < len(self.fast_cores):
            return f"{text}, but a container's limit of {self.quota:.1f}: {threads}"
        if len(self.fast_cores) < len(self.cores):
            return f"{text}: {threads}, as {len(self.cores) - len(self.fast_cores)} cores are slow"
        return f"{text}: {threads}, one a core"


def read_topology(usable: Collection[int], root: Path = ROOT) -> Topology:
    """Return the topology of the `usable` processors, read from Linux's files below `root`.

    Without these files, each processor counts as a core.
    """
    processors = tuple(sorted(usable))
    cores = _one_per_core(processors, root / _CPUS)
    return Topology(processors, cores, _fast(cores, root), processor_quota(root))


def parse_processors(text: str) -> set[int]:
    """Return the numbers in a list like "0-3,8"; raises `ValueError` for other texts."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if part:
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _one_per_core(processors: Sequence[int], cpus: Path) -> tuple[int, ...]:
    first: dict[str, int] = {}
    for number in processors:
        topology = cpus / f"cpu{number}" / "topology"
        siblings = read_text(topology / "core_cpus_list") or read_text(
            topology / "thread_siblings_list"
        )
        if siblings is None:  # not Linux, or hidden in a container
            return tuple(processors)
        first.setdefault(siblings, number)
    return tuple(first.values())


def _fast(cores: tuple[int, ...], root: Path) -> tuple[int, ...]:
    """Return the fast cores among `cores`; all of them if the system shows no difference.

    A core is judged by its capacity, or on Intel's hybrid processors by its type.
    """
    capacities = {core: read_number(root / _CPUS / f"cpu{core}" / "cpu_capacity") for core in cores}
    known = [capacity for capacity in capacities.values() if capacity is not None]
    if len(known) == len(cores) and known:
        least = _FAST_SHARE * max(known)
        return tuple(core for core, capacity in capacities.items() if (capacity or 0) >= least)
    fast = _numbers(root / "sys/devices/cpu_core/cpus")
    found = tuple(core for core in cores if core in fast)
    return found or cores


def _numbers(path: Path) -> set[int]:
    try:
        return parse_processors(read_text(path) or "")
    except ValueError:
        return set()
