"""Tells Transformers about Tandem: at once if it is loaded, else when it gets loaded.

`import tandem` must not load torch, and must work before and after `import transformers`. So this
file imports neither; a finder waits for the module that keeps Transformers' quantizers.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

_AWAITED = "transformers.quantizers.auto"


def register_with_transformers() -> None:
    """Make `OffloadConfig`, its quantizer and the experts function known to Transformers."""
    call_after_import(_AWAITED, _register)


def call_after_import(module: str, call: Callable[[], None]) -> None:
    """Call something when a module has been imported: now if it is there; once for each module."""
    if module in sys.modules:
        call()
    elif not any(isinstance(f, _Await) and f.awaited == module for f in sys.meta_path):
        sys.meta_path.insert(0, _Await(module, call))


def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.quantizers.auto import (
        AUTO_QUANTIZER_MAPPING,
        register_quantization_config,
        register_quantizer,
    )

    from tandem.hf.config import QUANT_METHOD, OffloadConfig
    from tandem.hf.experts import EXPERTS_IMPLEMENTATION, experts_forward
    from tandem.hf.quantizer import OffloadQuantizer

    if QUANT_METHOD in AUTO_QUANTIZER_MAPPING:
        return
    register_quantization_config(QUANT_METHOD)(OffloadConfig)
    register_quantizer(QUANT_METHOD)(OffloadQuantizer)
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, experts_forward)


class _Await(importlib.abc.MetaPathFinder):
    """Lets the awaited module load as usual and calls something right after it has run."""

    def __init__(self, awaited: str, call: Callable[[], None]) -> None:
        self.awaited, self._call = awaited, call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.awaited:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _CallAfter(spec.loader, self._call)
        return spec


class _CallAfter(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, call: Callable[[], None]) -> None:
        self._loader, self._call = loader, call

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._call()
