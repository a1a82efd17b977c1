"""Limits the memory of one fuzzer input; imports nothing large."""

import os
import resource
from pathlib import Path

_MEMORY_BYTES = 4 << 30  # of one input


def limit_memory() -> None:
    """Limit how much memory the process may add, so that a greater need is a finding.

    The limit is set for each input, because modules and torch keep memory of earlier ones.
    """
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, resource.RLIM_INFINITY))
