"""Starts the native engine: the only place that chooses its threads and instruction set."""

import functools

from tandem.core.errors import CapacityError, ConfigError
from tandem.core.registry import nearest_names
from tandem.kernels import _native
from tandem.kernels.cpu import usable_topology


@functools.cache
def best_isa() -> str:
    """Return the fastest instruction set of this CPU for which there are kernels."""
    return _native.available_isas()[0]


def choose_isa(name: str) -> str:
    """Return the instruction set with this name, or the best one if the name is "".

    Raises `ConfigError` if this CPU lacks the instruction set.
    """
    available = _native.available_isas()
    if name and name not in available:
        raise ConfigError(
            f"instruction set {name!r} is not on this processor; {nearest_names(name, available)}"
        )
    return name or best_isa()


def start_engine(*, num_threads: int, isa: str = "") -> _native.ExpertEngine:
    """Return an engine of `num_threads` threads: the calling thread, and new ones.

    The new threads are bound to the cores that `Topology.places` chooses, if the system permits it.
    `isa` is passed to `choose_isa`, which may raise `ConfigError`. Raises `CapacityError` if a
    thread cannot be started.
    """
    isa = choose_isa(isa)
    try:
        engine = _native.ExpertEngine(num_threads, isa)
    except RuntimeError as error:
        raise CapacityError(str(error)) from None
    engine.bind_workers(list(usable_topology().places(num_threads)))
    return engine
