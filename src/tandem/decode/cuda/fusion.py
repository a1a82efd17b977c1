"""Groups of a recorded step's operations that become one launch on a GPU.

Norms, rotary embeddings of halves and choices of experts are found as on the CPU. A sum is computed
with the norm that reads it. Two rotary embeddings with the same angles become one launch, and so do
packed linear layers with the same input (`projections`) and chains of elementwise operations
(`chains`). Recurrences read shared keys without repeating them.
"""

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from tandem.decode.cuda.chains import find_chains
from tandem.decode.cuda.projections import find_projections
from tandem.kernels.dense import row_stride
from tandem.kernels.native import TOKEN_DTYPES
from tandem.recording.fusion.graph import Finder, Found, Graph, replaced
from tandem.recording.fusion.norms import find_norms
from tandem.recording.fusion.rotary import find_rotaries
from tandem.recording.fusion.routers import find_choices, find_choices_first
from tandem.recording.recorder import Operation, Ref

_QUERY_AND_KEY = slice(4, 6)  # of the arguments of `tandem::recur`


def _of_few_keys(recur: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function like `recur`, but for queries and keys not repeated for each value head.

    Its queries and keys are (b, tokens, key heads, key_dim).
    """

    def call(*args: Tensor) -> Tensor:
        flat = [x.flatten(0, 1) for x in args[_QUERY_AND_KEY]]
        return recur(*args[: _QUERY_AND_KEY.start], *flat, *args[_QUERY_AND_KEY.stop :])

    return call


def _sums_with_norms(graph: Graph) -> Iterator[Found]:
    """Find the norms whose input is a sum of two tensors of the same shape."""
    from tandem.triton_kernels import operations

    for norm in graph.operations:
        settings = _settings(norm, operations.norm)
        if settings is None:
            continue
        total = graph.made_by(norm.args[0], "add")
        if total is None or total.kwargs or len(total.args) != 2:
            continue
        refs = total.inputs
        if len(refs) != 2 or not _are_alike(graph, *refs, norm.args[0]):
            continue
        outputs = [total.outputs[0], norm.outputs[0]]
        fused = Operation(
            partial(operations.add_and_norm, **settings), tuple(refs), {}, outputs, "add_and_norm",
            list(refs), returns_sequence=True,
        )  # fmt: skip
        yield Found([total, norm], fused)


def _settings(operation: Operation, function: object) -> dict[str, object] | None:
    """Return the arguments of an operation that is a `partial` of `function`; None for others."""
    call = operation.function
    return call.keywords if isinstance(call, partial) and call.func is function else None


def _are_alike(graph: Graph, *refs: Ref) -> bool:
    first, *_ = tensors = [graph.tensor(ref) for ref in refs]
    return (
        all(
            x.shape == first.shape and x.dtype == first.dtype and row_stride(x) is not None
            for x in tensors
        )
        and first.dtype in graph.dtypes
    )


def _pairs_of_rotaries(graph: Graph) -> Iterator[Found]:
    """Find pairs of rotary embeddings with the same angles, such as of queries and keys."""
    from tandem.triton_kernels import operations

    waiting: dict[object, Operation] = {}
    for rotary in graph.operations:
        settings = _settings(rotary, operations.rotate)
        if settings is None:
            continue
        x, cos, sin = rotary.args
        key = (cos, sin, settings["heads"], graph.tensor(x).shape[-1])
        first = waiting.pop(key, None)
        if first is None:
            waiting[key] = rotary
            continue
        args = (first.args[0], x, cos, sin)
        fused = Operation(
            partial(operations.rotate_two, **settings), args, {},
            [first.outputs[0], rotary.outputs[0]], "rotary", list(args), returns_sequence=True,
        )  # fmt: skip
        yield Found([first, rotary], fused)


def _repeated_keys(graph: Graph) -> Iterator[Found]:
    """Find recurrences that read repeated queries and keys; fused, they read unrepeated ones."""
    for recur in graph.operations:
        if recur.name != "recur":
            continue
        flats = [graph.made_by(ref, "flatten") for ref in recur.args[_QUERY_AND_KEY]]
        repeats = [
            graph.made_by(flat.args[0], "repeat_interleave")
            for flat in flats
            if flat is not None and flat.args[1:] == (0, 1)
        ]
        found = [each for each in repeats if each is not None and each.args[2:] == (2,)]
        if len(found) != 2 or found[0].args[1] != found[1].args[1]:
            continue
        before, after = _QUERY_AND_KEY.start, _QUERY_AND_KEY.stop
        whole = (repeat.args[0] for repeat in found)
        args = (*recur.args[:before], *whole, *recur.args[after:])
        fused = Operation(
            _of_few_keys(recur.function), args, recur.kwargs, recur.outputs, "recur",
            [ref for ref in args if isinstance(ref, Ref)], has_effects=True,
        )  # fmt: skip
        group = [*found, *(flat for flat in flats if flat is not None), recur]
        if not graph.is_read_outside(group, recur.outputs):
            yield Found(group, fused)


def _finders() -> tuple[Finder, ...]:
    from tandem.triton_kernels import operations

    def norm(weight: Tensor | None, eps: float, rounds_first: bool) -> Callable[..., Tensor]:
        return partial(operations.norm, weight=weight, eps=eps, rounds_first=rounds_first)

    def rotary(heads: int) -> Callable[..., Tensor]:
        return partial(operations.rotate, heads=heads)

    choice = partial(partial, operations.choose)
    return (
        partial(find_norms, make=norm),
        partial(find_rotaries, make=rotary, takes_prompts=True),
        partial(find_choices, make=choice),
        partial(find_choices_first, make=choice),
        _sums_with_norms,
        _pairs_of_rotaries,
        _repeated_keys,
        find_projections,
        find_chains,
    )


def fuse_for_gpu(
    operations: list[Operation], tensors: list[Tensor], fixed: set[int]
) -> list[Operation]:
    """Return `operations` with each group found replaced by one operation.

    `fixed` has the numbers of the tensors that never change.
    """
    return replaced(_finders(), operations, tensors, fixed, TOKEN_DTYPES)
