"""Records the torch operations of one decode step, below the model's Python code.

A decode step of a fixed number of tokens repeats the same operations on tensors of the same shapes,
if its attention reads lengths from the KV cache and not from shapes. So it is recorded only once.
A call with a state of its own (experts, attention) is recorded as one operation: see
`kernels.opaque_calls`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from tandem.hf.packed_layers import with_values
from tandem.kernels.opaque_calls import WITHOUT_EFFECTS, Meeting, mapped
from tandem.kernels.torch_private import TorchDispatchMode, operator_schema

# Operations that depend on tensors' values, not only on their shapes. Python code may have branched
# on the result, or it may decide the shapes of later tensors.
_DATA_DEPENDENT = {"_local_scalar_dense", "nonzero", "unique", "masked_select", "bincount", "item"}


class NotRecordableError(Exception):
    """The step cannot be recorded, for example because its operations depend on tensors' values."""


class Ref(NamedTuple):
    """A tensor of the recording, by number."""

    number: int


@dataclass(slots=True, eq=False)
class Operation:
    """One call: a function, its arguments with `Ref`s for tensors, and its results."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Ref | None]
    """The result, or each element of a returned sequence; None for a value that is not a tensor."""
    name: str
    """The ATen name without namespace and overload; for opaque calls, their kind."""
    inputs: list[Ref]
    """The tensors that the operation reads."""
    has_effects: bool = False
    returns_sequence: bool = False


@dataclass(slots=True)
class Recording:
    """The operations of a step in order, and every tensor seen, by number."""

    operations: list[Operation] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    produced: set[int] = field(default_factory=set)
    """The numbers of tensors that operations returned; all others existed before the recording."""

    def ref(self, tensor: Tensor) -> Ref:
        """Return the `Ref` of a recorded tensor."""
        return next(Ref(i) for i, seen in enumerate(self.tensors) if seen is tensor)


class Recorder(Meeting, TorchDispatchMode):
    """Records the torch operations inside its context, in `recording`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        # Id -> number; `recording.tensors` keeps the tensors alive.
        self._numbers: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        args, keywords = with_values((args, kwargs or {}))
        if self.is_paused:
            return func(*args, **keywords)
        schema = operator_schema(func)
        assert schema is not None
        name = schema.name.partition("::")[2]
        if name in _DATA_DEPENDENT:
            raise NotRecordableError(f"the model looks at values while it runs ({name})")
        results = func(*args, **keywords)
        self._note(func, name, args, keywords, results, has_effects=schema.is_mutable)
        return results

    def call(self, kind: str, function: Callable[..., Tensor], args: tuple[object, ...]) -> Tensor:
        """Run a function and record it as one operation, without the operations inside it."""
        results = super().call(kind, function, args)
        has_effects = kind not in WITHOUT_EFFECTS
        self._note(function, kind, args, {}, results, has_effects=has_effects)
        return results

    def _note(
        self,
        function: Callable[..., object],
        name: str,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        results: object,
        *,
        has_effects: bool,
    ) -> None:
        outputs = list(results) if isinstance(results, list | tuple) else [results]
        inputs: list[Ref] = []

        def ref(value: object) -> object:
            if not isinstance(value, Tensor):
                return value
            inputs.append(Ref(self._number(value)))
            return inputs[-1]

        noted_args, noted_kwargs = mapped(ref, (args, kwargs))
        is_argument = any(results is arg for arg in args if isinstance(arg, Tensor))
        if is_argument and (not has_effects or name == "detach_"):
            return  # e.g. `to` without a change; `torch.tensor` detaches its result
        for output in outputs:
            if isinstance(output, Tensor) and not is_argument:
                self.recording.produced.add(self._number(output))
        self.recording.operations.append(
            Operation(
                function,
                noted_args,
                noted_kwargs,
                [Ref(self._number(o)) if isinstance(o, Tensor) else None for o in outputs],
                name,
                inputs,
                has_effects=has_effects,
                returns_sequence=isinstance(results, list | tuple),
            )
        )

    def _number(self, tensor: Tensor) -> int:
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self.recording.tensors)
            self.recording.tensors.append(tensor)
        return number
