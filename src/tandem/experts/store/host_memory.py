"""How much memory this machine has free, as the operating system reports it."""

import os
import resource
import sys
from pathlib import Path

from tandem.core.errors import HostCapacityError
from tandem.core.units import format_bytes
from tandem.hardware.cgroups import memory_left
from tandem.hardware.topology import ROOT
from tandem.hardware.windows import memory_advice, wsl_version


def available_bytes() -> int:
    """Return the bytes that this process can still take without swapping."""
    limits = [memory_left(ROOT)]
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    except OSError:  # not Linux: the total, as an upper bound
        limits.append(total_bytes())
    return min(limit for limit in limits if limit is not None)


def process_bytes() -> int:
    """Return the bytes of memory that this process uses, with mapped files that it has read.

    On systems that do not report this, the result is the peak.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux
        return peak_process_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_process_bytes() -> int:
    """Return this process's peak memory in bytes, including pages that it could give back."""
    try:  # not getrusage, which also counts the memory of the process that started this one
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:  # not Linux
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def total_bytes() -> int:
    """Return the bytes of the machine's whole memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def require_host_memory(num_bytes: int, available: int, *, what: str, formats: str = "") -> None:
    """Raise `HostCapacityError` if `num_bytes` is more than `available`.

    In the message, `what` (a plural) names what takes the memory, and `formats`, if given, is the
    advice on what would fit.
    """
    if num_bytes <= available:
        return
    more = f"; {memory_advice(total_bytes())}" if wsl_version() == 2 else ""
    raise HostCapacityError(
        f"{what} take {format_bytes(num_bytes)} of host memory and {format_bytes(available)} are "
        f"free; {formats or 'close other programs or choose a smaller model'}{more}"
    )
