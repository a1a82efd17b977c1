"""A recording as a graph: producers and consumers of tensors, and groups to replace."""

from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.recording.program import memory_of
from tandem.recording.recorder import Operation, Ref


class Found(NamedTuple):
    """A group of operations, and its replacement, which takes the place of the group's last one."""

    group: list[Operation]
    fused: Operation


class Graph:
    """Operations with the producer and consumers of each tensor.

    `dtypes` are the dtypes that the replacing kernels support.
    """

    def __init__(
        self,
        operations: list[Operation],
        tensors: list[Tensor],
        fixed: set[int],
        dtypes: Container[torch.dtype],
    ) -> None:
        self.operations = operations
        self.tensors = tensors
        self.fixed, self.dtypes = fixed, dtypes
        self.maker: dict[Ref, Operation] = {}
        self.users: dict[Ref, list[Operation]] = {}
        for operation in operations:
            for ref in operation.outputs:
                if ref is not None and ref not in operation.inputs:
                    self.maker[ref] = operation
            for ref in set(operation.inputs):
                self.users.setdefault(ref, []).append(operation)
        self._place = {id(operation): index for index, operation in enumerate(operations)}
        self._replaced: dict[int, Operation | None] = {}

    @property
    def has_replaced(self) -> bool:
        """Whether a group has been replaced."""
        return bool(self._replaced)

    def made_by(self, ref: object, name: str) -> Operation | None:
        """Return a tensor's producer if it is named `name` and has no effects; else None."""
        operation = self.maker.get(ref) if isinstance(ref, Ref) else None
        is_it = operation is not None and operation.name == name and not operation.has_effects
        return operation if is_it else None

    def only_user(self, ref: Ref | None, name: str) -> Operation | None:
        """Return the only operation that reads a tensor, if it is named `name`; else None."""
        users = self.users.get(ref, []) if ref is not None else []
        return users[0] if len(users) == 1 and users[0].name == name else None

    def found_around(
        self, name: str, match: Callable[[Operation], Found | None]
    ) -> Iterator[Found]:
        """Yield the groups that `match` finds around operations named `name`."""
        for operation in self.operations:
            found = match(operation) if operation.name == name else None
            if found is not None:
                yield found

    def is_read_outside(self, group: list[Operation], results: Iterable[Ref | None]) -> bool:
        """Tell whether an operation outside a group reads an intermediate tensor of the group.

        The group's intermediate tensors are all that it makes, except `results`.
        """
        made = {ref for operation in group for ref in operation.outputs} - {None, *results}
        return any(user not in group for ref in made if ref for user in self.users.get(ref, []))

    def tensor(self, ref: Ref) -> Tensor:
        """Return a tensor from the recording."""
        return self.tensors[ref.number]

    def shares_memory(self, first: Ref, second: Ref) -> bool:
        """Tell whether two recorded tensors share memory."""
        return memory_of(self.tensor(first)) == memory_of(self.tensor(second))

    def is_written_between(self, refs: Iterable[Ref], first: Operation, last: Operation) -> bool:
        """Tell whether an operation from `first` up to, not including, `last` may write `refs`."""
        between = self.operations[self._place[id(first)] : self._place[id(last)]]
        read = [*refs]
        return any(
            self.shares_memory(mine, ref)
            for writer in between if writer.has_effects for ref in writer.inputs for mine in read
        )  # fmt: skip

    def replace(self, group: list[Operation], fused: Operation) -> None:
        """Put `fused` in the place of a group's last operation, and drop the group's others.

        Does nothing if an operation of the group is replaced already, or if an operation outside
        the group reads a result of `fused` before that place.
        """
        if any(id(operation) in self._replaced for operation in group):
            return
        place = self._place[id(group[-1])]
        new = (ref for ref in fused.outputs if ref and ref not in fused.inputs)
        readers = (op for ref in new for op in self.users.get(ref, []))
        if any(self._place[id(op)] < place and op not in group for op in readers):
            return
        self._replaced |= dict.fromkeys(map(id, group[:-1]))
        self._replaced[id(group[-1])] = fused

    def result(self) -> list[Operation]:
        """Return the operations with the replacements in place."""
        found = (self._replaced.get(id(op), op) for op in self.operations)
        return [operation for operation in found if operation is not None]


Finder = Callable[[Graph], Iterator[Found]]


def replaced(
    finders: Iterable[Finder],
    operations: list[Operation],
    tensors: list[Tensor],
    fixed: set[int],
    dtypes: Container[torch.dtype],
) -> list[Operation]:
    """Apply the finders one after another; return the operations with all found groups replaced."""
    graph = Graph(operations, tensors, fixed, dtypes)
    for finder in finders:
        for group, fused in finder(graph):
            graph.replace(group, fused)
        if graph.has_replaced:  # otherwise the next finder can use the same graph
            graph = Graph(graph.result(), tensors, fixed, dtypes)
    return graph.operations


def other(operation: Operation, ref: Ref) -> Any:
    """Return the argument of a two-argument operation that is not `ref`."""
    first, second = operation.args[:2]
    return second if first == ref else first
