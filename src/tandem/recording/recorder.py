"""Records what one decode step does, operation by operation, below the model's Python code.

A decode step of a fixed number of rows does the same operations on tensors of the same shapes each
time, if its attention reads lengths from the KV cache and not from shapes. So it is recorded once.
What has a life of its own (experts, attention) is one operation: `opaque`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from tandem.hf.dense import with_values
from tandem.hf.opaque_calls import ACTIVE
from tandem.kernels.torch_private import TorchDispatchMode, operator_schema, tree_map

# Operations whose result depends on the values of tensors, not only on their shapes: Python code
# may have branched on them, or the shapes of what follows may change.
_DATA_DEPENDENT = {"_local_scalar_dense", "nonzero", "unique", "masked_select", "bincount", "item"}


class NotRecordableError(Exception):
    """The step does something that another step may do differently."""


class Ref(NamedTuple):
    """A tensor of the recording, by number."""

    number: int


@dataclass(slots=True, eq=False)
class Operation:
    """One call: a function, its arguments with `Ref`s for tensors, and what came out."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Ref | None]
    """One per returned tensor; more than one means that the function returns a sequence."""
    name: str
    """The ATen name without its namespace and overload; of opaque calls, their kind."""
    inputs: list[Ref]
    """The tensors that are read."""
    has_effects: bool = False
    returns_sequence: bool = False


@dataclass(slots=True)
class Recording:
    """The operations of a step in their order, and every tensor that was seen, by number."""

    operations: list[Operation] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    produced: set[int] = field(default_factory=set)
    """Numbers of tensors that came out of an operation; the others were there before."""

    def ref(self, tensor: Tensor) -> Ref:
        """Return a recorded tensor's number."""
        return next(Ref(i) for i, seen in enumerate(self.tensors) if seen is tensor)


class Recorder(TorchDispatchMode):
    """Active as a context; afterwards `recording` holds what was done inside."""

    is_capturing = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self._numbers: dict[int, int] = {}  # by id; `recording.tensors` keeps the tensors alive
        self._is_paused = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = with_values((args, kwargs or {}))
        assert kwargs is not None
        if self._is_paused:
            return func(*args, **kwargs)
        schema = operator_schema(func)
        name = schema.name.partition("::")[2]
        if name in _DATA_DEPENDENT:
            raise NotRecordableError(f"the model looks at values while it runs ({name})")
        results = func(*args, **kwargs)
        self._note(func, name, args, kwargs, results, has_effects=schema.is_mutable)
        return results

    def call(self, kind: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a function whose inside is not recorded, and note it as one operation."""
        self._is_paused = True
        try:
            results = function(*args)
        finally:
            self._is_paused = False
        self._note(function, kind, args, {}, results, has_effects=True)
        return results

    def _note(
        self,
        function: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: Any,
        *,
        has_effects: bool,
    ) -> None:
        is_sequence = isinstance(results, list | tuple)
        outputs = list(results) if is_sequence else [results]
        inputs: list[Ref] = []
        refs = self._refs([args, kwargs], inputs)
        is_argument = any(results is arg for arg in args if isinstance(arg, Tensor))
        if is_argument and (not has_effects or name == "detach_"):
            return  # `to` of a tensor that is that already; `torch.tensor` detaches what it makes
        for output in outputs:
            if isinstance(output, Tensor) and not is_argument:
                self.recording.produced.add(self._number(output))
        self.recording.operations.append(
            Operation(
                function,
                refs[0],
                refs[1],
                [Ref(self._number(o)) if isinstance(o, Tensor) else None for o in outputs],
                name,
                inputs,
                has_effects=has_effects,
                returns_sequence=is_sequence,
            )
        )

    def _refs(self, values: Any, inputs: list[Ref]) -> Any:
        """Replace tensors by their numbers, however deep in lists, and collect these."""

        def ref(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            inputs.append(Ref(self._number(value)))
            return inputs[-1]

        return tree_map(ref, values)

    def _number(self, tensor: Tensor) -> int:
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self.recording.tensors)
            self.recording.tensors.append(tensor)
        return number

    def __enter__(self) -> "Recorder":
        self._token = ACTIVE.set(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        ACTIVE.reset(self._token)
