"""Limits the memory that one input of the fuzzer may take; imports nothing that takes some."""

import os
import resource
from pathlib import Path

_MEMORY_BYTES = 4 << 30  # of one input


def limit_memory() -> None:
    """Let the process take so much memory beside what it has: more is a find, not a full machine.

    For each input again: what the modules and torch keep of the ones before is not this one's.
    """
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, resource.RLIM_INFINITY))
