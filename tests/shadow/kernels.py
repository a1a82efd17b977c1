"""Triton's kernels on the shadow device: interpreted by its thread, with checked memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from tests.kernels.interpreter import interpreted
from tests.shadow.captures import launch
from tests.shadow.tensor import Shadow, present
from tests.shadow.twins import compute_experts


@contextmanager
def launched_kernels(*, has_twins: bool) -> Iterator[None]:
    """Launch the kernels that are imported inside on the shadow device; `has_twins` for experts."""
    with interpreted() as patch:
        from triton.runtime import interpreter

        run = interpreter.GridExecutor.__call__

        def queue(self: Any, *args: Any, **kwargs: Any) -> None:
            name = self.fn.__name__
            uses = [
                (each.held, True) for each in (*args, *kwargs.values()) if isinstance(each, Shadow)
            ]
            given = [_reached(name, each) for each in args]
            named = {key: _reached(name, each) for key, each in kwargs.items()}
            if "on_gpu" in named:  # GPU instructions that cannot be interpreted
                named["on_gpu"] = False

            def work() -> None:
                with np.errstate(all="ignore"):  # a GPU does not report infinities
                    run(self, *given, **named)

            launch(name, work, uses)

        patch.setattr(interpreter.GridExecutor, "__call__", queue)
        if has_twins:
            from tandem.triton_kernels.experts import TritonExperts

            patch.setattr(TritonExperts, "compute", compute_experts(TritonExperts.compute))
        yield


def _reached(kernel: str, argument: Any) -> Any:
    """Return a kernel argument's values; a fault if a GPU cannot reach the memory."""
    if isinstance(argument, Shadow):
        return argument.held
    if isinstance(argument, Tensor) and argument.numel():
        gpu = present()
        if gpu.pinned_at(argument.data_ptr()) is None:
            gpu.fault(f"{kernel} is given memory of the host that is not pinned")
    return argument
