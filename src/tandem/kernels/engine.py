"""Starts the native engine: the one place that chooses its threads and instruction set."""

from tandem.core.errors import ConfigError
from tandem.core.registry import nearest_names
from tandem.kernels import _native
from tandem.kernels.cpu import one_processor_per_core


def best_isa() -> str:
    """Return the fastest instruction set of this processor that the kernels are written for."""
    return _native.available_isas()[0]


def start_engine(*, num_threads: int, isa: str = "") -> _native.ExpertEngine:
    """Start `num_threads` - 1 threads, each on a core of its own; the caller is one more.

    `isa` names an instruction set, "" takes the best. Raises `ConfigError` for one that this
    processor does not have.
    """
    available = _native.available_isas()
    if isa and isa not in available:
        raise ConfigError(
            f"instruction set {isa!r} is not on this processor; {nearest_names(isa, available)}"
        )
    engine = _native.ExpertEngine(num_threads, isa or best_isa())
    engine.bind_workers(one_processor_per_core())
    return engine
