"""Removes operations that repeat earlier ones, such as a scaling by position in each layer."""

from dataclasses import replace

from torch import Tensor

from tandem.kernels.opaque_calls import mapped
from tandem.recording.program import NativeCall, memory_of
from tandem.recording.recorder import Operation, Ref

_RANDOM = ("rand", "bernoulli", "multinomial", "dropout", "normal", "exponential", "uniform")


def without_repeats(operations: list[Operation], tensors: list[Tensor]) -> list[Operation]:
    """Return the operations without torch operations that repeat an earlier one.

    A repetition has the same function and arguments. Operations stay if they read or write memory
    that any operation modifies in place.
    """
    written = {
        memory_of(tensors[r.number]) for op in operations if op.has_effects for r in op.inputs
    }
    same: dict[Ref, Ref] = {}
    seen: dict[object, list[Ref | None]] = {}
    kept = []
    for recorded in operations:
        operation = _renamed(recorded, same)
        refs = [*operation.inputs, *filter(None, operation.outputs)]
        is_fixed = not any(memory_of(tensors[ref.number]) in written for ref in refs)
        key = _key(operation) if is_fixed else None
        if key is None:
            kept.append(operation)
        elif key in seen:
            pairs = zip(operation.outputs, seen[key], strict=True)
            same |= {new: old for new, old in pairs if new is not None and old is not None}
        else:
            seen[key] = operation.outputs
            kept.append(operation)
    return kept


def _renamed(operation: Operation, same: dict[Ref, Ref]) -> Operation:
    if same.keys().isdisjoint(operation.inputs):
        return operation

    def ref(value: object) -> object:
        return same.get(value, value) if isinstance(value, Ref) else value

    args, kwargs = mapped(ref, (operation.args, operation.kwargs))
    inputs = [same.get(ref, ref) for ref in operation.inputs]
    return replace(operation, args=args, kwargs=kwargs, inputs=inputs)


def _key(operation: Operation) -> object:
    """Return a key; operations with equal keys have equal results.

    None for an operation that is native, random, without inputs, with effects or not hashable.
    """
    is_random = any(word in operation.name for word in _RANDOM)
    if operation.has_effects or is_random or not operation.inputs:
        return None
    if isinstance(operation.function, NativeCall):
        return None
    key = (operation.function, _hashable(operation.args), _hashable(operation.kwargs))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _hashable(value: object) -> object:
    if isinstance(value, Ref):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple((name, _hashable(value[name])) for name in sorted(value))
    return type(value), value  # 1, 1.0 and True would be equal
