"""Detects the CPU: its name, instruction sets, cores and caches."""

import os
from dataclasses import dataclass
from pathlib import Path

from tandem.hardware.topology import Topology, read_topology
from tandem.kernels import _native


@dataclass(frozen=True, slots=True)
class CpuInfo:
    """A description of the CPU; `topology` has only the logical CPUs that this process may use."""

    model_name: str
    vendor: str
    instruction_sets: tuple[str, ...]
    topology: Topology
    l1_data_bytes: int
    l2_bytes: int
    l3_bytes: int

    @property
    def num_threads(self) -> int:
        """The default number of threads."""
        return self.topology.num_threads


def detect_cpu() -> CpuInfo:
    """Return a description of this machine's CPU; takes under a millisecond."""
    features = _native.detect_cpu_features()
    return CpuInfo(
        model_name=_model_name(),
        vendor=features.vendor,
        instruction_sets=tuple(features.instruction_sets),
        topology=usable_topology(),
        l1_data_bytes=features.l1_data_bytes,
        l2_bytes=features.l2_bytes,
        l3_bytes=features.l3_bytes,
    )


def usable_topology() -> Topology:
    """Return the topology of the logical CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return read_topology(os.sched_getaffinity(0))
    return read_topology(range(os.cpu_count() or 1))


def _model_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    import platform

    return platform.processor() or platform.machine()
