"""Products of small matrices: of activations, and of weights that stay unpacked."""

from torch import Tensor

from tandem.kernels import _native
from tandem.recording.fusion.elementwise import KINDS, are_floats
from tandem.recording.fusion.graph import Graph
from tandem.recording.fusion.views import MAX_DIMENSIONS, Small, add_combination
from tandem.recording.recorder import Operation, Ref

# Largest size of the second matrix, in values. Larger ones deserve a packed form, or torch's own
# order of reading.
_MOST_VALUES = 1 << 21


def match_product(graph: Graph, operation: Operation) -> Small | None:
    """Return the native form of a product with a small second matrix; None for other operations.

    The second matrix is (..., depth, columns), or the weight of a linear layer, (columns, depth).
    """
    refs = [ref for ref in operation.args if ref is not None]
    result = operation.outputs[0]
    if operation.kwargs or result is None or not all(isinstance(ref, Ref) for ref in refs):
        return None
    if operation.name in ("matmul", "bmm", "mm"):
        add = _add_matmul
    elif operation.name == "linear":
        add = _add_linear
    else:
        return None
    tensors = [graph.tensor(ref) for ref in refs]
    a, b = tensors[:2]
    if not are_floats(*tensors, graph.tensor(result)) or b.numel() > _MOST_VALUES:
        return None
    are_matrices = all(2 <= x.dim() <= MAX_DIMENSIONS for x in (a, b))
    return Small(refs, add) if are_matrices else None


def _add_matmul(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    (a, b), (out,) = inputs, outputs
    a, b = (x.expand(*out.shape[:-2], *x.shape[-2:]) for x in (a, b))
    program.add_product(a, b, out)


def _add_linear(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Add a linear layer to a program, for all rows at once, so that the weight is read once."""
    (x, weight, *bias), (out,) = inputs, outputs
    if x.is_contiguous():
        x, flat = x.view(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    else:
        flat = out
    b = weight.T.expand(*flat.shape[:-2], *weight.T.shape)
    program.add_product(x, b, flat)
    if bias:
        add_combination(program, KINDS["add"], [out, bias[0]], out)
