"""Runs a recorded step again as one flat Python function, without the model's own code around it.

Of a step's 4,000 operations most are views and small arithmetic, which the model's Python code
calls through modules, wrappers and checks. The recorded graph calls operations directly, omits
those whose results are not read, computes constant results only once, frees each tensor after its
last use, and puts native operations into programs (`tandem.recording.program`).
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.dense import CpuThreads
from tandem.recording.fusion import fuse
from tandem.recording.program import BufferPlan, NativeCall, compile_program, memory_of
from tandem.recording.recorder import Operation, Recorder, Recording, Ref

# Functions that torch keeps (not compiled into programs) -> public functions with the same
# positional arguments. Calling these takes a third of the time of the ATen overload.
_DIRECT: dict[str, Callable[..., object]] = {
    "add.Tensor": torch.add,
    "mul.Tensor": torch.mul,
    "linear.default": F.linear,
    "matmul.default": torch.matmul,
    "mm.default": torch.mm,
}

# (operations, tensors, numbers of constant tensors) -> operations with groups replaced.
Fusing = Callable[[list[Operation], list[Tensor], set[int]], list[Operation]]

# Operations that torch may sum in another order if the number of rows differs.
_PRODUCTS = {"linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "convolution", "dot", "mv"}

# Operations without tensor arguments whose result is always the same.
_SAME_EACH_TIME = {"arange", "zeros", "ones", "full", "scalar_tensor"}


class RecordedGraph:
    """A recorded step as a function without arguments, on fixed tensors."""

    def __init__(
        self,
        recording: Recording,
        result: Tensor,
        inputs: Iterable[Tensor],
        threads: CpuThreads | None = None,
        *,
        fusing: Fusing | None = None,
    ) -> None:
        """Compile a recording whose `inputs` change between runs and whose result is `result`.

        With `threads`, native kernels replace the groups of operations that they support; without
        `threads`, `fusing` (if given) replaces groups.
        """
        self._operations = _live(recording.operations, recording.ref(result))
        numbers = {id(tensor): number for number, tensor in enumerate(recording.tensors)}
        changing = {numbers[id(x)] for x in inputs if id(x) in numbers}
        self._operations, constants = _fold(
            self._operations, recording, changing | recording.produced
        )
        if threads is not None:
            fusing = partial(fuse, threads=threads)
        if fusing is not None:
            fixed = set(constants) - changing
            self._operations = fusing(self._operations, recording.tensors, fixed)
        self.has_torch_products = any(
            op.name in _PRODUCTS and not isinstance(op.function, NativeCall)
            for op in self._operations
        )
        """Whether torch computes matrix products, so that results may depend on the number of
        tokens."""
        self._plan = BufferPlan(
            self._operations, recording.tensors, constants, recording.ref(result)
        )
        self._result = recording.ref(result)
        self._shapes = [tuple(tensor.shape) for tensor in recording.tensors]
        self._function = _compile(self._operations, self._plan, self._result)

    def __len__(self) -> int:
        return len(self._operations)

    @property
    def num_calls(self) -> int:
        """How many calls a run makes: programs, and operations outside programs."""
        return len(_parts(self._operations, self._plan, are_apart=False))

    @property
    def operations(self) -> Sequence[Operation]:
        """The operations of a run, in order."""
        return self._operations

    @property
    def place_bytes(self) -> int:
        """The bytes of the fixed buffers that native operations read and write."""
        return self._plan.num_bytes

    @torch.inference_mode()
    def run(self) -> Tensor:
        """Run the step again; return its result."""
        return self._function()

    @torch.inference_mode()
    def profile(self, num_runs: int) -> list[tuple[Operation, float]]:
        """Run the step several times; return each operation that runs, with its mean seconds.

        A profiled run is slower than `run`, because native operations are not joined to programs.
        """
        seconds = [0.0] * len(self._operations)
        timed = _compile(self._operations, self._plan, self._result, seconds)
        for _ in range(num_runs):
            timed()
        return [
            (operation, seconds[index] / num_runs)
            for index, operation in enumerate(self._operations)
            if index not in self._plan.views
        ]

    def shape_of(self, ref: Ref) -> tuple[int, ...]:
        """Return the shape of a recorded tensor."""
        return self._shapes[ref.number]


def record_step(
    step: Callable[[], Tensor], inputs: Iterable[Tensor], threads: CpuThreads | None = None
) -> tuple[Tensor, RecordedGraph]:
    """Run and record a step that reads `inputs`; return its result and its recorded graph.

    Raises `NotRecordableError` for a step that reads a tensor's value in Python.
    """
    recorder = Recorder()
    with recorder:
        result = step()
    return result, RecordedGraph(recorder.recording, result, inputs, threads)


def _live(operations: list[Operation], result: Ref) -> list[Operation]:
    """Return the operations that have effects, or on which `result` or an effect depends."""
    needed = {result}
    kept = []
    for operation in reversed(operations):
        if operation.has_effects or any(output in needed for output in operation.outputs):
            kept.append(operation)
            needed.update(operation.inputs)
    return kept[::-1]


def _fold(
    operations: list[Operation], recording: Recording, varying: set[int]
) -> tuple[list[Operation], dict[int, Tensor]]:
    """Return the operations that each run must repeat, and the constants that they read.

    `varying` has the numbers of tensors that change between runs or are results of operations. The
    constants are by tensor number. A tensor in memory that an operation writes is never constant.
    """
    written = {
        memory_of(recording.tensors[ref.number])
        for op in operations
        if op.has_effects
        for ref in op.inputs
    }
    fixed = {n for n in range(len(recording.tensors)) if n not in varying}
    kept = []
    for operation in operations:
        outputs = [o for o in operation.outputs if o is not None]
        is_fixed = bool(operation.inputs) or operation.name in _SAME_EACH_TIME
        is_fixed &= all(ref.number in fixed for ref in operation.inputs)
        met = (recording.tensors[ref.number] for ref in [*operation.inputs, *outputs])
        is_written = any(memory_of(tensor) in written for tensor in met)
        if operation.has_effects or not is_fixed or is_written:
            kept.append(operation)
        else:
            fixed.update(ref.number for ref in outputs)
    read = {ref.number for op in kept for ref in op.inputs}
    still_produced = {
        o.number for op in kept for o in op.outputs if o is not None and o not in op.inputs
    }
    constants = {n: recording.tensors[n] for n in read - still_produced}
    return kept, constants


def _compile(
    operations: list[Operation], plan: BufferPlan, result: Ref, seconds: list[float] | None = None
) -> Callable[[], Tensor]:
    """Return a function that runs the operations and returns the tensor `result`.

    With `seconds`, the function adds the time of each operation to the entry of the same index.
    """
    namespace: dict[str, object] = {f"v{n}": tensor for n, tensor in plan.tensors.items()}
    namespace |= {"now": time.perf_counter, "seconds": seconds}
    last_use = {ref.number: i for i, op in enumerate(operations) for ref in op.inputs}
    lines = []
    local: set[int] = set()
    for part in _parts(operations, plan, are_apart=seconds is not None):
        index = part[0]
        namespace[f"f{index}"] = _function(operations, part, plan)
        if isinstance(operations[index].function, NativeCall):
            lines.append(f"f{index}()")
        else:
            operation = operations[index]
            lines += _lines(index, operation, plan, namespace)
            outputs = [o.number for o in operation.outputs if o and o not in operation.inputs]
            local.update(number for number in outputs if number not in plan.tensors)
            read = {ref.number for ref in operation.inputs} | set(outputs)
            ended = [n for n in read if n in local and last_use.get(n, index) <= index]
            ended = sorted(n for n in ended if n != result.number)
            if ended:
                lines.append("del " + ", ".join(f"v{n}" for n in ended))
                local.difference_update(ended)
        if seconds is not None:
            lines.append(f"end = now(); seconds[{index}] += end - begin; begin = end")
    # The next run overwrites buffers, but the caller keeps the result.
    copy = ".clone()" if result.number in plan.tensors else ""
    body = "\n".join(f"    {line}" for line in lines)
    exec(f"def step():\n    begin = now()\n{body}\n    return v{result.number}{copy}\n", namespace)
    return cast("Callable[[], Tensor]", namespace["step"])


def _parts(operations: list[Operation], plan: BufferPlan, *, are_apart: bool) -> list[list[int]]:
    """Split operations into calls, as lists of indices: programs, and single operations.

    With `are_apart`, each native operation is a program of its own.
    """
    parts: list[list[int]] = []
    for index, operation in enumerate(operations):
        if index in plan.views:
            continue
        before = operations[parts[-1][-1]].function if parts else None
        joins = (
            not are_apart
            and isinstance(operation.function, NativeCall)
            and isinstance(before, NativeCall)
            and before.threads is operation.function.threads
        )
        if joins:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts


def _function(
    operations: list[Operation], part: list[int], plan: BufferPlan
) -> Callable[..., object]:
    first = operations[part[0]]
    if isinstance(first.function, NativeCall):
        return compile_program([operations[index] for index in part], plan)
    return _direct(first)


def _direct(operation: Operation) -> Callable[..., object]:
    if operation.kwargs:
        return operation.function
    return _DIRECT.get(str(operation.function).removeprefix("aten."), operation.function)


def _lines(
    index: int, operation: Operation, plan: BufferPlan, namespace: dict[str, object]
) -> list[str]:
    parts = [_expression(arg, namespace) for arg in operation.args]
    parts += [f"{name}={_expression(v, namespace)}" for name, v in operation.kwargs.items()]
    call = f"f{index}({', '.join(parts)})"
    # A tensor that an operation writes in place keeps its name.
    new = [o.number if o and o not in operation.inputs else None for o in operation.outputs]
    placed = [number for number in new if number in plan.tensors]
    names = ["_" if n is None else f"t{n}" if n in placed else f"v{n}" for n in new]
    targets = f"{', '.join(names)}," if operation.returns_sequence else names[0]
    return [f"{targets} = {call}", *(f"v{n}.copy_(t{n}); del t{n}" for n in placed)]


def _expression(value: object, namespace: dict[str, object]) -> str:
    if isinstance(value, Ref):
        return f"v{value.number}"
    if isinstance(value, list):
        return "[" + ", ".join(_expression(v, namespace) for v in value) + "]"
    if value is None or isinstance(value, bool | int):
        return repr(value)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    name = f"k{len(namespace)}"
    namespace[name] = value
    return name
