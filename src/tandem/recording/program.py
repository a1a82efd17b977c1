"""Programs: adjacent native operations of a recorded graph as one call, on fixed memory.

A step's tensors have the same shapes each time, so each tensor that native operations read or write
gets a buffer once; views are also made once. A buffer is reused after its last read.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from tandem.kernels import _native
from tandem.kernels.dense import CpuThreads
from tandem.kernels.opaque_calls import mapped
from tandem.kernels.torch_private import operator_schema
from tandem.recording.recorder import NotRecordableError, Operation, Ref

_GRANULE_BYTES = 64  # a cache line

Report = Callable[[], None]


@dataclass(frozen=True, slots=True)
class NativeCall:
    """Adds a native operation to a program; stands in an `Operation` in place of a function."""

    add: Callable[[_native.Program, list[Tensor], list[Tensor]], Report | None]
    """Adds the operation with its inputs and outputs; may return a report, a function to call after
    each run."""
    threads: CpuThreads
    """The threads that run the operation; a program has only operations of the same threads."""
    reported: Sequence[int] = ()
    """Indices of the inputs that the report reads; their buffers stay until the graph has run."""

    def __call__(self, *args: object) -> NoReturn:
        """Raise: an operation's function must be callable, but a native call is never called."""
        raise AssertionError("a native operation runs as part of a program")


def require_contiguous(*tensors: Tensor) -> None:
    """Raise `NotRecordableError` unless all tensors are contiguous."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise NotRecordableError("a native operation would read a tensor that has gaps")


def may_alias(operation: Operation) -> bool:
    """Tell whether an operation's results may share memory with its inputs."""
    schema = operator_schema(operation.function)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


class BufferPlan:
    """The tensors of a recorded graph that have a fixed address: constants, buffers and views."""

    def __init__(
        self,
        operations: Sequence[Operation],
        tensors: Sequence[Tensor],
        constants: dict[int, Tensor],
        result: Ref,
    ) -> None:
        """Assign a buffer to each tensor that native operations read or write."""
        self.tensors: dict[int, Tensor] = dict(constants)
        self.views: set[int] = set()
        """Indices of operations that do not run, because their results are views of buffers."""
        self._groups = _Groups(operations, tensors)
        self._native_groups = {
            self._groups.of(ref.number)
            for operation in operations
            if isinstance(operation.function, NativeCall)
            for ref in (*operation.inputs, *filter(None, operation.outputs))
        }
        self._memory = _Memory()
        last_use = self._groups.last_uses(operations)
        last_use[self._groups.of(result.number)] = len(operations)
        for index, operation in enumerate(operations):
            self._place(index, operation, tensors)
            self._memory.release(index, last_use)

    @property
    def num_bytes(self) -> int:
        """Bytes that the buffers take."""
        return self._memory.num_bytes

    def _place(self, index: int, operation: Operation, tensors: Sequence[Tensor]) -> None:
        if may_alias(operation) and self._is_view(operation):
            self.views.add(index)
            return
        for ref in operation.outputs:
            if ref is None or ref in operation.inputs:
                continue
            group = self._groups.of(ref.number)
            if group in self._native_groups:
                self.tensors[ref.number] = self._memory.take(tensors[ref.number], group)

    def _is_view(self, operation: Operation) -> bool:
        """Tell whether an operation's results are views of fixed tensors; create them if so."""
        if operation.has_effects or any(r.number not in self.tensors for r in operation.inputs):
            return False

        def place(value: object) -> object:
            return self.tensors[value.number] if isinstance(value, Ref) else value

        args, kwargs = mapped(place, (operation.args, operation.kwargs))
        results = operation.function(*args, **kwargs)
        results = list(results) if operation.returns_sequence else [results]
        memory = {memory_of(self.tensors[ref.number]) for ref in operation.inputs}
        if any(memory_of(result) not in memory for result in results):
            return False
        for ref, result in zip(operation.outputs, results, strict=True):
            if ref is not None:
                self.tensors[ref.number] = result
        return True


def memory_of(tensor: Tensor) -> int:
    """Return the address of the memory that a tensor shares with its views."""
    address: int = tensor.untyped_storage().data_ptr()
    return address


class _Groups:
    """Groups of tensors that share memory in the recording, or may share it by torch's schemas."""

    def __init__(self, operations: Iterable[Operation], tensors: Sequence[Tensor]) -> None:
        self._parent: dict[int, int] = {}
        for operation in operations:
            for ref in filter(None, operation.outputs):
                for source in operation.inputs:
                    is_shared = memory_of(tensors[ref.number]) == memory_of(tensors[source.number])
                    if may_alias(operation) or is_shared:
                        self._parent[self.of(ref.number)] = self.of(source.number)

    def of(self, number: int) -> int:
        """Return the representative number of a tensor's group."""
        while (parent := self._parent.get(number, number)) != number:
            number = parent
        return number

    def last_uses(self, operations: Sequence[Operation]) -> dict[int, int]:
        """Return, for each group, the index of the last operation that reads or writes the group.

        For a group that a report reads, the index is the number of operations: the group is in use
        until the end of the run.
        """
        last = {
            self.of(ref.number): index
            for index, operation in enumerate(operations)
            for ref in (*operation.inputs, *filter(None, operation.outputs))
        }
        for operation in operations:
            if isinstance(operation.function, NativeCall):
                kept = [operation.inputs[place] for place in operation.function.reported]
                last |= {self.of(ref.number): len(operations) for ref in kept}
        return last


class _Memory:
    """Allocates and reuses buffers."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._used: list[tuple[int, Tensor]] = []  # (group, buffer)
        self.num_bytes = 0

    def take(self, like: Tensor, group: int) -> Tensor:
        """Reserve a buffer for `group`; return a contiguous tensor in it, with `like`'s shape."""
        num_bytes = max(1, -(-like.nbytes // _GRANULE_BYTES)) * _GRANULE_BYTES
        free = self._free.setdefault(num_bytes, [])
        if not free:
            free.append(torch.empty(num_bytes, dtype=torch.uint8, device="cpu"))
            self.num_bytes += num_bytes
        memory = free.pop()
        self._used.append((group, memory))
        return memory[: like.nbytes].view(like.dtype).view(like.shape)

    def release(self, index: int, last_use: dict[int, int]) -> None:
        """Release the buffers of groups that no operation after `index` reads or writes."""
        for group, memory in self._used:
            if last_use[group] <= index:
                self._free[memory.nbytes].append(memory)
        self._used = [(group, memory) for group, memory in self._used if last_use[group] > index]


def compile_program(operations: Sequence[Operation], plan: BufferPlan) -> Callable[[], None]:
    """Return a function that runs native operations in one call.

    All operations must use the same `CpuThreads` object, which runs them.
    """
    threads = operations[0].function.threads  # type: ignore[attr-defined]
    program = threads.program()
    reports: list[Report] = []
    for operation in operations:
        inputs = [plan.tensors[ref.number] for ref in operation.inputs]
        outputs = [plan.tensors[ref.number] for ref in filter(None, operation.outputs)]
        report = operation.function.add(program, inputs, outputs)  # type: ignore[attr-defined]
        if report is not None:
            reports.append(report)
    return _reporting(program.run, reports) if reports else program.run


def _reporting(run: Callable[[], None], reports: list[Report]) -> Callable[[], None]:
    def run_and_report() -> None:
        run()
        for report in reports:
            report()

    return run_and_report
