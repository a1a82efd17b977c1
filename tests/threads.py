"""Kernel threads for tests: two, kept, with the instruction set that the test runs with."""

import functools

from tandem.kernels import engine
from tandem.kernels.dense import CpuThreads


def two_threads() -> CpuThreads:
    """Return threads of the instruction set that `--isa` or a test's `isa` forces."""
    return _threads(engine.best_isa())


@functools.cache
def _threads(isa: str) -> CpuThreads:
    return CpuThreads(num_threads=2, isa=isa)
