"""Registers Tandem with Transformers, at once or as soon as Transformers is loaded.

`import tandem` must not load torch, and must work before and after `import transformers`. So this
module imports neither torch nor Transformers at first; a finder waits until the module with
Transformers' quantizers is imported.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_AWAITED = "transformers.quantizers.auto"


def register_with_transformers() -> None:
    """Register `OffloadConfig`, its quantizer and `experts_forward` with Transformers.

    If Transformers' quantizers are not imported yet, this happens right after their import.
    """
    if _AWAITED in sys.modules:
        _register()
    elif not any(isinstance(finder, _Await) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Await())


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
    """Import hook: registers Tandem right after Transformers' module of quantizers has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _AWAITED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisterAfter(spec.loader)
        return spec


class _RegisterAfter(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register()
