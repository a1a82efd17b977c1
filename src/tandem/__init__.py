"""Tandem: Mixture-of-Experts models on one GPU that is too small for them, CPU and GPU together.

    import tandem
    model = tandem.load("path/to/model")

Importing tandem takes milliseconds and loads no torch; the names in `__all__` load their modules
when they are first used.
"""

import importlib
import os
from typing import TYPE_CHECKING

from tandem.registration import register_with_transformers

if TYPE_CHECKING:
    from tandem.core.errors import TandemError
    from tandem.generate.generator import Generator
    from tandem.hf.config import OffloadConfig
    from tandem.hf.load import load
    from tandem.hf.pack import pack
    from tandem.hf.save import save

__all__ = ["Generator", "OffloadConfig", "TandemError", "__version__", "load", "pack", "save"]

_HOMES = {
    "Generator": "tandem.generate.generator",
    "OffloadConfig": "tandem.hf.config",
    "TandemError": "tandem.core.errors",
    "load": "tandem.hf.load",
    "pack": "tandem.hf.pack",
    "save": "tandem.hf.save",
}

# OpenMP reads this when torch loads it. By default its threads spin for 300,000 rounds after each
# operation and take cores from the kernels' threads. Import tandem before torch.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

register_with_transformers()


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("tandem-moe")
    if name not in _HOMES:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
