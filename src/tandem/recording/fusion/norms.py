"""RMS norms: square, mean, root, scaling, rounding and weight as one call."""

from collections.abc import Callable, Iterator

from torch import Tensor

from tandem.kernels import _native
from tandem.kernels.dense import CpuThreads, row_stride
from tandem.recording.fusion.graph import Found, Graph, other
from tandem.recording.program import NativeCall
from tandem.recording.recorder import NotRecordableError, Operation, Ref

_CASTS = ("to", "type_as", "_to_copy")


# (weight in fp32, epsilon, whether it rounds before the weight) -> the fused norm.
MakeNorm = Callable[[Tensor | None, float, bool], Callable[..., object]]


def find_norms(graph: Graph, make: MakeNorm) -> Iterator[Found]:
    """Find RMS norms, each around its reciprocal root; `make` returns a norm's replacement."""
    for name in ("rsqrt", "pow"):
        yield from graph.found_around(name, lambda root: _match_norm(graph, root, make))


def _match_norm(graph: Graph, root: Operation, make: MakeNorm) -> Found | None:
    if root.name == "pow" and root.args[1] != -0.5:
        return None
    shift = graph.made_by(root.args[0], "add")
    mean = graph.made_by(shift.args[0], "mean") if shift else None
    square = graph.made_by(mean.args[0], "pow") if mean else None
    if not (shift and mean and square) or not isinstance(shift.args[1], float):
        return None
    if mean.args[1:] != ([-1], True) or square.args[1] != 2:
        return None
    wide = square.args[0]
    scaled = graph.only_user(root.outputs[0], "mul")
    if scaled is None or other(scaled, root.outputs[0]) != wide:  # type: ignore[arg-type]
        return None
    chain = [square, mean, shift, root, scaled]
    casts = [cast for name in _CASTS if (cast := graph.made_by(wide, name))]
    for before in (casts, []):  # including the cast of the input, or starting at the input in fp32
        source = before[0].args[0] if before else wide
        whole = [*before, *chain]
        if graph.is_read_outside(whole, scaled.outputs):
            continue
        end = _follow(graph, whole, source)
        if end is not None:
            whole, weight, rounds_first = end
            call = make(weight, float(shift.args[1]), rounds_first)
            fused = Operation(call, (source,), {}, whole[-1].outputs, "rms_norm", [source])
            return Found(whole, fused)
    return None


def _follow(
    graph: Graph, chain: list[Operation], source: Ref
) -> tuple[list[Operation], Tensor | None, bool] | None:
    """Extend a norm's chain by the operations after it: rounding and the weight, in any order.

    Returns the whole chain, the weight in fp32 (None: there is none), and whether rounding comes
    before the weight. Returns None if the norm's input or result is not supported.
    """
    x = graph.tensor(source)
    if x.dtype not in graph.dtypes or row_stride(x) is None:
        return None
    weight: Tensor | None = None
    rounds_first = False
    chain = list(chain)
    while True:
        last = chain[-1].outputs[0]
        users = graph.users.get(last, []) if last is not None else []
        step = users[0] if len(users) == 1 else None
        if step is None or last is None:
            break
        if (
            step.name in _CASTS
            and step.outputs[0]
            and graph.tensor(step.outputs[0]).dtype == x.dtype
        ):
            rounds_first = weight is None
        elif step.name == "mul" and weight is None and _is_weight(graph, other(step, last), x):
            weight = graph.tensor(other(step, last)).float().contiguous()
        else:
            break
        chain.append(step)
    result = chain[-1].outputs[0]
    if result is None or graph.tensor(result).dtype != x.dtype:
        return None
    return chain, weight, rounds_first


def _is_weight(graph: Graph, ref: object, x: Tensor) -> bool:
    return (
        isinstance(ref, Ref)
        and ref.number in graph.fixed
        and graph.tensor(ref).shape == x.shape[-1:]
    )


def norm_call(
    threads: CpuThreads, weight: Tensor | None, eps: float, rounds_first: bool
) -> NativeCall:
    """Return the native call of an RMS norm over rows.

    With `rounds_first`, the norm rounds before it multiplies by `weight`.
    """

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        (x,), (out,) = inputs, outputs
        if row_stride(x) is None:
            raise NotRecordableError("a norm's rows do not lie evenly apart")
        program.add_norm(eps, rounds_first, x, weight, 0, None, out)

    return NativeCall(add, threads)
