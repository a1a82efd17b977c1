"""Triton's interpreter, in which kernels run on the CPU: it decides when a kernel is decorated."""

import dataclasses
import importlib
import os
from collections.abc import Callable, Iterator
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
        patch.setattr(interpreter, "_patch_lang", _PatchedOnce(interpreter._patch_lang))
        # A third of the time: its checks of sums and products are for debugging, which is off.
        builder = interpreter.interpreter_builder
        options = dataclasses.replace(builder.options, sanitize_overflow=False)
        patch.setattr(builder, "options", options)
        yield patch


class _PatchedOnce:
    """Replaces Triton's language for a launch, and not again for each function that it calls."""

    def __init__(self, patch_language: Callable[[Any], Any]) -> None:
        self._patch_language = patch_language
        self._is_patched = False

    def __call__(self, function: Any) -> Any:
        if self._is_patched:  # the scope of a called function is never closed
            return None
        scope = self._patch_language(function)
        self._is_patched = True
        restore = scope.restore

        def restored() -> None:
            self._is_patched = False
            restore()

        scope.restore = restored
        return scope


def interpreted_module(name: str) -> Any:
    """Return a fixture: a module of kernels, interpreted while a test module runs."""

    @pytest.fixture(scope="module")
    def module() -> Iterator[ModuleType]:
        with interpreted():
            yield importlib.import_module(name)

    return module
