"""CUDA graphs on the shadow device: queued work is recorded, undone, and run by a replay."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.shadow.gpu import ShadowGpu
from tests.shadow.order import Memory
from tests.shadow.tensor import present


class _Touched(NamedTuple):
    """Bytes that a graph uses; it does not keep memory of others alive, only its address."""

    memory: "weakref.ref[Memory] | None"
    tensor: Tensor
    writes: bool
    what: str


class ShadowGraph:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._gpu: ShadowGpu = present()
        self._works: list[Callable[[], None]] = []
        self._fresh: list[Tensor] = []
        self._touched: list[_Touched] = []
        self.pool: Any = None
        self.thread = self.stream_number = -1
        self.is_whole = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        gpu = self._gpu
        if gpu.capture is not None:
            gpu.fault("a capture begins in another")
        if gpu.stream is None:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self.pool, self.thread, self.stream_number = pool, threading.get_ident(), gpu.stream_number
        gpu.worker.join()
        gpu.capture = self

    def capture_end(self) -> None:
        gpu = self._gpu
        if gpu.capture is not self:
            raise RuntimeError("capture_end without a capture")
        gpu.capture = None
        self.is_whole = True
        for result in self._fresh:  # nothing was done yet
            gpu.poison(result)

    def replay(self) -> None:
        gpu = self._gpu
        if not self.is_whole:
            raise RuntimeError("replay without a preceding successful capture.")
        gpu.launched.append("graph")
        moment = gpu.begin_work("a graph")
        for memory, tensor, writes, what in self._touched:
            if memory is not None and memory() is None:
                gpu.fault(f"a graph uses memory that was given back ({what})")
            gpu.use(tensor, moment, f"graph: {what}", writes=writes)
        if gpu.is_capturing:
            gpu.fault("a graph is launched in a capture")
        gpu.queue(self._run, moment)

    def reset(self) -> None:
        self._works.clear()
        self._fresh.clear()
        self._touched.clear()
        self.is_whole = False

    def note(
        self, function: Any, args: Any, kwargs: Any, uses: Sequence[tuple[Tensor, bool]]
    ) -> Any:
        """Run an operation for its results' shapes, undo its writes, and record it."""
        name = function._schema.name
        before = [(tensor, tensor.clone()) for tensor, writes in uses if writes]
        results = function(*args, **kwargs)
        for tensor, was in before:
            tensor.copy_(was)
        known = {tensor.untyped_storage().data_ptr() for tensor, _ in uses}
        fresh = [
            each
            for each in tree_leaves(results)
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in known
        ]
        self.touch(uses, name)
        self._fresh += fresh

        def work() -> None:
            again = [each for each in tree_leaves(function(*args, **kwargs))]
            for new, old in zip(again, tree_leaves(results), strict=True):
                if isinstance(new, Tensor) and any(old is each for each in fresh):
                    old.copy_(new)

        self._works.append(work)
        return results

    def note_launch(
        self, what: str, work: Callable[[], None], uses: Sequence[tuple[Tensor, bool]] = ()
    ) -> None:
        """Record work without tensor results."""
        self.touch(uses, what)
        self._works.append(work)

    def touch(self, uses: Sequence[tuple[Tensor, bool]], what: str) -> None:
        for tensor, writes in uses:
            if tensor.numel() == 0:
                continue
            memory = self._gpu._memories.get(tensor.untyped_storage().data_ptr())
            known = None
            if memory is not None and getattr(memory.pool, "pool", None) != self.pool:
                known = weakref.ref(memory)
            self._touched.append(_Touched(known, tensor, writes, what))

    def _run(self) -> None:
        for work in self._works:
            work()


def launch(what: str, work: Callable[[], None], uses: Sequence[tuple[Tensor, bool]]) -> None:
    """Queue work for the GPU's thread on the current stream, or record it during a capture."""
    gpu = present()
    moment = gpu.begin_work(what)
    gpu.launched.append(what)
    if gpu.capture is not None:
        gpu.capture.note_launch(what, work, uses)
        return
    for tensor, writes in uses:
        gpu.use(tensor, moment, what, writes=writes)
    gpu.queue(work, moment)
