"""Triton's interpreter, in which kernels run on the CPU: it decides when a kernel is decorated."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest


@contextmanager
def interpreted() -> Iterator[pytest.MonkeyPatch]:
    """Interpret the kernels that are imported and launched inside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TRITON_INTERPRET", "1")
        from triton.runtime import interpreter

        original = interpreter._patch_lang_tensor

        def patched(tensor: Any, scope: Any) -> None:
            original(tensor, scope)
            # As numpy 2.4 has it: an array of one element is no number, and bounds of loops are.
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        patch.setattr(interpreter, "_patch_lang_tensor", patched)
        yield patch


def interpreted_module(name: str) -> Any:
    """Return a fixture: a module of kernels, interpreted while a test module runs."""

    @pytest.fixture(scope="module")
    def module() -> Iterator[ModuleType]:
        with interpreted():
            yield importlib.import_module(name)

    return module
