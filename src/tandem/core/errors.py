"""Errors that a user can act on: messages say what was found, what was expected, what to do."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

# Messages of libraries and the dynamic linker when the system is out of threads or memory.
_NO_THREAD = ("can't start new thread", "Resource temporarily unavailable")
_NO_MEMORY = ("can't allocate memory", "Cannot allocate memory", "failed to map segment")


class TandemError(Exception):
    """Any error due to a user, a file or the machine; the command exits with code 2."""


class ConfigError(TandemError, ValueError):
    """An option, a key or a name that Tandem does not know or cannot use."""


class ModelError(TandemError, ValueError):
    """A model or checkpoint that cannot be loaded."""


class UnsupportedModelError(ModelError):
    """A model that is intact, but that Tandem cannot run; the reason is in the message."""


class FileFormatError(TandemError, ValueError):
    """A trace, profile or packed file whose content violates its format."""


class CapacityError(TandemError, MemoryError):
    """Something that needs more memory, or more threads, than this machine allows."""


class HostCapacityError(CapacityError):
    """A model whose experts do not fit into host memory; once packed, it can run from the disk."""


class ExecutionError(TandemError, RuntimeError):
    """A step that failed before its end; the request is lost, but the model can be used again."""


class BuildError(TandemError, RuntimeError):
    """Something that Tandem builds on this machine, such as the demo model, could not be built."""


def first_line(error: Exception) -> str:
    """Return the first line of a library's error message, without its full stop."""
    reason = error.strerror if isinstance(error, OSError) else None
    line = (reason or str(error)).strip().partition("\n")[0].rstrip(".")
    return line or type(error).__name__


def exhaustion(error: BaseException) -> CapacityError | None:
    """Return a `CapacityError` if too few threads or too little memory caused the error.

    Returns None for other errors.
    """
    words = str(error)
    if isinstance(error, OSError) and error.errno != errno.ENOMEM:
        return None  # streams may be "temporarily unavailable", too
    if any(sign in words for sign in _NO_THREAD):
        what = "cannot start more threads"
    elif isinstance(error, MemoryError) or any(sign in words for sign in _NO_MEMORY):
        what = "has no more memory"
    else:
        return None
    return CapacityError(
        f"the system {what}; end other programs, or raise the limits of threads and memory "
        "(ulimit -u and -v, a container's)"
    )


@contextmanager
def capacity_errors() -> Iterator[None]:
    """Turn other libraries' errors about threads or memory into `CapacityError`."""
    try:
        yield
    except TandemError:
        raise
    except Exception as error:
        capacity_error = exhaustion(error)
        if capacity_error is None:
            raise
        raise capacity_error from error


class TandemWarning(UserWarning):
    """A warning for the user that stops nothing; commands print it as one line."""
