"""What tests look into of a loaded model."""

from typing import Any

from tandem.hf.runtime import require_runtime


def runtime_in(model: Any) -> Any:
    """Return a loaded model's `Runtime`, untyped: a test knows which executor it has asked for."""
    return require_runtime(model)
