"""CUDA graphs without CUDA: the CPU twin of `CudaCapture`.

A graph segment is a list of the ATen operations that ran. A replay runs them again and writes each
result to its original memory. As with CUDA, code between segments is not repeated, and code that
reads values on the host cannot be captured.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_LOOKS_AT_VALUES = {"_local_scalar_dense", "nonzero", "unique", "masked_select", "item"}


class TwinGraph(TorchDispatchMode):
    """Operations and their results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.name.partition("::")[2] in _LOOKS_AT_VALUES:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        results = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, results))
        return results

    def replay(self) -> None:
        for function, args, kwargs, results in self.operations:
            again = function(*args, **kwargs)
            for new, old in zip(tree_leaves(again), tree_leaves(results), strict=True):
                if isinstance(new, Tensor) and not _shares(new, old):
                    old.copy_(new)


class _NoWaits(TorchDispatchMode):
    """Forbids reading values on the host, as torch does in an error mode for synchronisation."""

    is_on = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.is_on and func._schema.name.partition("::")[2] in _LOOKS_AT_VALUES:
            raise RuntimeError(f"called a synchronizing operation: {func}")
        return func(*args, **(kwargs or {}))


class TwinCapture:
    """Captures twin graphs."""

    def __init__(self) -> None:
        self._graph: TwinGraph | None = None
        self._no_waits: _NoWaits | None = None
        self.broken: TwinGraph | None = None

    @contextmanager
    def waits(self, *, allowed: bool) -> Iterator[None]:
        if self._no_waits is None:
            assert not allowed, "waits are allowed anyway"
            self._no_waits = _NoWaits()  # type: ignore[no-untyped-call]
            try:
                with self._no_waits:
                    yield
            finally:
                self._no_waits = None
            return
        before, self._no_waits.is_on = self._no_waits.is_on, not allowed
        try:
            yield
        finally:
            self._no_waits.is_on = before

    def begin(self) -> None:
        self._graph = TwinGraph()
        self._graph.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> TwinGraph:
        graph, self._graph = self._graph, None
        assert graph is not None
        graph.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return graph

    def abandon(self) -> None:
        if self._graph is not None:
            self.broken = self.end()


def _shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def read_on_host(x: Tensor) -> bool:
    """Read a value on the host, which cannot be captured."""
    return bool(torch.any(x > 0).item())
