"""Triton's interpreter, which runs kernels on the CPU; chosen when a kernel is decorated."""

import dataclasses
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@contextmanager
def interpreted() -> Iterator[pytest.MonkeyPatch]:
    """Interpret the kernels that are imported and launched in this context."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TRITON_INTERPRET", "1")
        from triton.runtime import interpreter

        original = interpreter._patch_lang_tensor

        def patched(tensor: Any, scope: Any) -> None:
            original(tensor, scope)
            # In numpy 2.4 an array of one element is no number, but loop bounds are such arrays.
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        patch.setattr(interpreter, "_patch_lang_tensor", patched)
        patch.setattr(interpreter, "_patch_lang", _PatchedOnce(interpreter._patch_lang))
        builtins = _BuiltinsOnce(interpreter._patch_builtin)
        patch.setattr(interpreter, "_patch_builtin", builtins)
        patch.setattr(interpreter, "_get_np_dtype", _np_dtypes(interpreter._get_np_dtype))
        _keep_shapes(patch)
        # A third of the time: its checks of sums and products are for debugging, which is disabled.
        builder = interpreter.interpreter_builder
        options = dataclasses.replace(builder.options, sanitize_overflow=False)
        patch.setattr(builder, "options", options)
        yield patch


class _PatchedOnce:
    """Patches Triton's language once per launch, not again for each called function."""

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


class _BuiltinsOnce:
    """Finds the Triton builtins of a module or class once, not again for each launch."""

    def __init__(self, patch_builtins: Callable[[Any, Any, Any], None]) -> None:
        self._patch_builtins = patch_builtins
        self._found: dict[Any, list[tuple[Any, str, Any]]] = {}

    def __call__(self, package: Any, builder: Any, scope: Any) -> None:
        if package not in self._found:
            found = self._found[package] = list[tuple[Any, str, Any]]()
            recorder = SimpleNamespace(set_attr=lambda *change: found.append(change))
            self._patch_builtins(package, builder, recorder)
        for change in self._found[package]:
            scope.set_attr(*change)


def _np_dtypes(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `original` with cached results; it builds a table at each call."""
    known: dict[str, Any] = {}

    def np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = original(dtype)
        return known[name]

    return np_dtype


def _keep_shapes(patch: pytest.MonkeyPatch) -> None:
    """Cache what each tensor and tensor type computes from its shape."""
    from triton.language import core

    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(s.value if isinstance(s, core.constexpr) else s for s in shape))
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        self.__dict__ |= blocks[key]
        self.element_ty = element_ty

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = (self.shape, self.numel)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    patch.setattr(core.block_type, "__init__", block)
    patch.setattr(core.tensor, "__init__", tensor)


def interpreted_module(name: str) -> Any:
    """Return a fixture: a kernel module that is interpreted while a test module runs."""

    @pytest.fixture(scope="module")
    def module() -> Iterator[ModuleType]:
        with interpreted():
            yield importlib.import_module(name)

    return module
