"""What this processor is: instruction sets, cores and caches, asked from the native part."""

import os
from dataclasses import dataclass
from pathlib import Path

from tandem.kernels import _native


@dataclass(frozen=True, slots=True)
class CpuInfo:
    """The processor as the kernels see it; cores are those that this process may use."""

    model_name: str
    vendor: str
    instruction_sets: tuple[str, ...]
    physical_cores: int
    logical_cores: int
    l1_data_bytes: int
    l2_bytes: int
    l3_bytes: int


def detect_cpu() -> CpuInfo:
    """Ask the processor and the operating system; takes under a millisecond."""
    features = _native.detect_cpu_features()
    return CpuInfo(
        model_name=_model_name(),
        vendor=features.vendor,
        instruction_sets=tuple(features.instruction_sets),
        physical_cores=len(one_processor_per_core()),
        logical_cores=len(_usable_cpus()),
        l1_data_bytes=features.l1_data_bytes,
        l2_bytes=features.l2_bytes,
        l3_bytes=features.l3_bytes,
    )


def _usable_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def one_processor_per_core() -> list[int]:
    """Return a logical processor of each physical core that this process may use.

    Two hyper-threads of one core share its multipliers, so that a second one gains nothing.
    """
    first: dict[str, int] = {}
    usable = sorted(_usable_cpus())
    for cpu in usable:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            first.setdefault(topology.read_text(), cpu)
        except OSError:  # not Linux, or hidden in a container
            return usable
    return list(first.values())


def _model_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    import platform

    return platform.processor() or platform.machine()
