"""Torch functions that a prompt calls between its layers and attention, computed natively.

While a prompt runs, each torch function that the model's code calls is intercepted: residuals,
routers, activations, angles. Functions that have a small native operation (csrc/tensor_ops.hpp) run
natively; their results may differ from torch's in the last bit. Decode steps are not intercepted:
they are recorded (decision 8).
"""

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tandem.kernels import _native
from tandem.kernels.dense import VALUE_DTYPES, CpuThreads, DenseWeight, multiply
from tandem.kernels.opaque_calls import ACTIVE, Meeting
from tandem.kernels.torch_private import without_overrides
from tandem.recording.fusion.elementwise import CASTS, KINDS
from tandem.recording.fusion.lookups import add_rows
from tandem.recording.fusion.reductions import add_greatest, add_reduction, add_softmax, is_last
from tandem.recording.fusion.routers import pack_small
from tandem.recording.fusion.views import (
    ELEMENT_DTYPES,
    FLOAT_DTYPES,
    MAX_DIMENSIONS,
    add_combination,
)

# Names of torch's functions with one argument, and with two.
_ONE = ("silu", "sigmoid", "relu", "exp", "sin", "cos", "tanh", "neg", "sqrt", "rsqrt")
_TWO = ("add", "mul", "sub", "div")
_CAST_TO = {"float": torch.float32, "bfloat16": torch.bfloat16}
_REDUCTIONS = {"sum": 0, "mean": 1}

Arguments = tuple[Any, ...]
Keywords = Mapping[str, Any]
# Takes the arguments of a torch function and returns its result; None: torch must compute it.
Native = Callable[["PromptOperations", Arguments, Keywords], object]


# Each layer of a prompt asks for the same shapes, and computing one takes longer than many
# operations.
_broadcast_shape = functools.lru_cache(maxsize=1024)(torch.broadcast_shapes)


class PromptOperations(Meeting, TorchFunctionMode):
    """A context that intercepts torch functions, for one thread at a time.

    Functions inside opaque calls are not intercepted. `threads` compute the native operations.
    """

    def __init__(self, threads: CpuThreads) -> None:
        super().__init__()
        self._threads = threads
        self._packed: dict[int, tuple[weakref.ref[Tensor], DenseWeight | None]] = {}
        """Small weights packed in bf16, by their tensor's id; None if large or rounded by bf16."""
        self._widened: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        """The bf16 tensor from which an fp32 tensor was converted, by the fp32 tensor's id."""
        self.norm_kinds: dict[object, object] = {}
        """How each class of norms computes; the module `norms` fills and reads this."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> object:
        kwargs, name = kwargs or {}, func.__name__
        if name.endswith("_") and args:  # an in-place operation may write to it
            self._widened.pop(id(args[0]), None)
        native = None if self.is_paused else _NATIVE.get(name)
        result = None if native is None else native(self, args, kwargs)
        return func(*args, **kwargs) if result is None else result

    def run(self, add: Callable[[_native.Program], None]) -> None:
        """Run the operations that `add` adds to a program."""
        program = self._threads.program()
        with without_overrides():
            add(program)
        program.run()

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor | None:
        """Return `x` rotated by halves, for one sequence; None if shapes or dtypes do not fit.

        `x` is (1, heads, n, dim) or (1, n, heads, dim); `heads` is the dimension of the heads.
        `cos` and `sin` are (1, n, rotated); only the first `rotated` values of a head are rotated.
        """
        tokens = 3 - heads
        num_tokens, rotated = cos.shape[-2:]
        is_fit = (
            x.dim() == 4 and len(x) == 1 and x.stride(3) == 1 and x.dtype in VALUE_DTYPES
            and cos.numel() == num_tokens * rotated and x.shape[tokens] == num_tokens
            and all(t.dtype == x.dtype and t.is_contiguous() for t in (cos, sin))
        )  # fmt: skip
        if not is_fit or rotated > x.shape[3]:
            return None
        out = torch.empty((1, num_tokens, x.shape[heads], x.shape[3]), dtype=x.dtype, device="cpu")

        def add(program: _native.Program) -> None:
            by_token = x[0].transpose(0, 1) if heads == 1 else x[0]
            program.add_rotary(by_token, cos, sin, out)

        self.run(add)
        return out.transpose(1, 2) if heads == 1 else out

    def rotate_pairs(self, x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor | None:
        """Return `x` rotated by pairs of neighbours; None if shapes or dtypes do not fit.

        The arguments are those of `rotate`, but `cos` and `sin` are (1, n, pairs); only the last
        2 x `pairs` values of a head are rotated.
        """
        tokens = 3 - heads
        num_tokens, pairs = cos.shape[-2:]
        is_fit = (
            x.dim() == 4 and len(x) == 1 and x.stride(3) == 1 and x.dtype in VALUE_DTYPES
            and cos.numel() == num_tokens * pairs and x.shape[tokens] == num_tokens
            and sin.shape == cos.shape and _is_known(cos) and _is_known(sin)
        )  # fmt: skip
        if not is_fit or not 0 < 2 * pairs <= x.shape[3]:
            return None
        out = torch.empty((1, num_tokens, x.shape[heads], x.shape[3]), dtype=x.dtype, device="cpu")
        with without_overrides():
            turns = torch.stack((cos, sin), dim=-1).float()

        def add(program: _native.Program) -> None:
            by_token = x[0].transpose(0, 1) if heads == 1 else x[0]
            program.add_rotary_pairs(by_token, turns, out)

        self.run(add)
        return out.transpose(1, 2) if heads == 1 else out

    def combine(self, kind: int, args: Arguments, out: Tensor | None = None) -> Tensor | None:
        """Compute an elementwise operation (`KINDS`) of tensors and numbers; return its result.

        The result is written to `out` if that is given. Returns None if torch must compute the
        operation.
        """
        tensors = [x for x in args if isinstance(x, Tensor)]
        numbers = [x for x in args if not isinstance(x, Tensor)]
        if not tensors or not all(_is_known(x) and x.dim() for x in tensors):
            return None
        if not all(type(x) in (int, float) for x in numbers):
            return None
        shape = _broadcast_shape(*(x.shape for x in tensors))
        dtype = tensors[0].dtype if len({x.dtype for x in tensors}) == 1 else torch.float32
        if out is None:
            like = next((x for x in tensors if x.shape == shape), None)
            if like is None:
                out = torch.empty(shape, dtype=dtype, device="cpu")
            else:  # strides as in torch, because the model may take views of the result
                out = torch.empty_like(like, dtype=dtype, device="cpu")
        elif (out.shape, out.dtype) != (shape, dtype):
            return None
        self.run(lambda program: add_combination(program, kind, args, out))
        return out

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return a tensor converted to another dtype; None: torch must convert it."""
        is_known = type(x) in _PLAIN and x.device.type == "cpu" and x.dtype in ELEMENT_DTYPES
        if not is_known or x.dtype == dtype or dtype not in FLOAT_DTYPES:
            return None
        out = torch.empty_like(x, dtype=dtype)
        self.run(lambda program: add_combination(program, KINDS["copy"], [x], out))
        if x.dtype == torch.bfloat16:
            number = id(out)
            forget = weakref.ref(out, lambda _: self._widened.pop(number, None))
            self._widened[number] = forget, x
        return out

    def before(self, x: Tensor) -> Tensor:
        """Return the bf16 tensor from which `x` was converted to fp32, or `x` itself."""
        return self._widened[id(x)][1] if id(x) in self._widened else x

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return a small linear layer's product.

        None if the layer is large, or bf16 would round its inputs, weights or bias.
        """
        if not (_is_known(x) and _is_known(weight)) or self.before(x).dtype != torch.bfloat16:
            return None
        packed = self._pack(self.before(weight), bias)
        return None if packed is None else multiply(self._threads, [packed], x)[0]

    def _pack(self, weight: Tensor, bias: Tensor | None) -> DenseWeight | None:
        known = self._packed.get(id(weight))
        if known is None or known[0]() is not weight:
            known = weakref.ref(weight), pack_small(weight, bias)
            self._packed[id(weight)] = known
        return known[1]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._widened.clear()


def active_operations() -> PromptOperations | None:
    """Return the `PromptOperations` of the prompt that runs now; None if no prompt runs."""
    active = ACTIVE.get()
    return active if isinstance(active, PromptOperations) else None


_PLAIN = (Tensor, nn.Parameter)


def _is_known(x: object) -> TypeGuard[Tensor]:
    """Tell whether `x` is a plain floating-point tensor in host memory."""
    if not isinstance(x, Tensor) or type(x) not in _PLAIN:
        return False
    return x.device.type == "cpu" and x.dtype in FLOAT_DTYPES


def _has_rows(x: object) -> bool:
    return _is_known(x) and 1 <= x.dim() <= MAX_DIMENSIONS and x.numel() > 0


# ---- torch's functions, by how their arguments are read ----


def _elementwise(name: str, num_operands: int) -> Native:
    def native(ops: PromptOperations, args: Arguments, kwargs: Keywords) -> object:
        if len(args) != num_operands or any(kwargs.values()):
            return None
        return ops.combine(KINDS[name], args)

    return native


def _in_place(name: str) -> Native:
    def native(ops: PromptOperations, args: Arguments, kwargs: Keywords) -> object:
        return None if kwargs or len(args) != 2 else ops.combine(KINDS[name], args, args[0])

    return native


def _cast(ops: PromptOperations, args: Arguments, kwargs: Keywords) -> object:
    if len(args) + len(kwargs) != 2 or kwargs.keys() - {"dtype"}:
        return None
    target = args[1] if len(args) == 2 else kwargs["dtype"]
    dtype = target.dtype if isinstance(target, Tensor) else target
    return ops.cast(args[0], dtype) if isinstance(dtype, torch.dtype) else None


def _cast_to(dtype: torch.dtype) -> Native:
    return lambda ops, args, kwargs: ops.cast(args[0], dtype)


def _softmax(ops: PromptOperations, args: Arguments, kwargs: Keywords) -> object:
    x, *rest = args
    dim = rest[0] if rest else kwargs.get("dim")
    if not _has_rows(x) or len(rest) > 1 or not is_last(dim, x):
        return None
    dtype = kwargs.get("dtype") or x.dtype
    if dtype not in FLOAT_DTYPES:
        return None
    out = torch.empty(x.shape, dtype=dtype, device="cpu")
    ops.run(lambda program: add_softmax(program, [x], [out]))
    return out


def _greatest(ops: PromptOperations, args: Arguments, kwargs: Keywords) -> object:
    x, *rest = args
    options = dict(zip(("k", "dim", "largest", "sorted"), rest, strict=False)) | dict(kwargs)
    if not _has_rows(x) or options.keys() - _GREATEST_KEYS:
        return None
    count = options.get("k")
    if not is_last(options.get("dim", -1), x) or not options.get("largest", True):
        return None
    if type(count) is not int or count > x.shape[-1]:
        return None
    values = torch.empty((*x.shape[:-1], count), dtype=x.dtype, device="cpu")
    index = torch.empty(values.shape, dtype=torch.int64, device="cpu")
    ops.run(lambda program: add_greatest(program, x, count, values, index))
    return torch.return_types.topk((values, index))


_GREATEST_KEYS = {"k", "dim", "largest", "sorted"}


def _reduction(name: str) -> Native:
    def native(ops: PromptOperations, args: Arguments, kwargs: Keywords) -> object:
        x, *rest = args
        options = dict(zip(("dim", "keepdim"), rest, strict=False)) | dict(kwargs)
        dims = options.pop("dim", None)
        (dim,) = dims if isinstance(dims, list | tuple) and len(dims) == 1 else (dims,)
        if type(dim) is not int or options.keys() - {"keepdim"} or not _has_rows(x):
            return None
        shape = [1 if d == dim % x.dim() else size for d, size in enumerate(x.shape)]
        out = torch.empty(shape, dtype=x.dtype, device="cpu")
        ops.run(lambda program: add_reduction(program, _REDUCTIONS[name], dim, x, out))
        return out if options.get("keepdim") else out.squeeze(dim)

    return native


def _linear(ops: PromptOperations, args: Arguments, kwargs: Keywords) -> object:
    x, weight, *rest = args
    bias = rest[0] if rest else kwargs.get("bias")
    return ops.multiply(x, weight, bias)


def _join(ops: PromptOperations, args: Arguments, kwargs: Keywords) -> object:
    tensors, *rest = args
    dim = rest[0] if rest else kwargs.get("dim", 0)
    first = tensors[0]
    if not all(_is_known(x) and x.dtype == first.dtype for x in tensors):
        return None
    if any(x.dim() != first.dim() for x in tensors) or kwargs.keys() - {"dim"}:
        return None
    sizes = [x.shape[dim] for x in tensors]
    shape = list(first.shape)
    shape[dim] = sum(sizes)
    out = torch.empty(shape, dtype=first.dtype, device="cpu")

    def add(program: _native.Program) -> None:
        for x, part in zip(tensors, out.split(sizes, dim), strict=True):
            add_combination(program, KINDS["copy"], [x], part)

    ops.run(add)
    return out


def _rows(ops: PromptOperations, args: Arguments, kwargs: Keywords) -> object:
    index, table = args[:2]
    is_plain = len(args) == 2 and not (kwargs.get("max_norm") or kwargs.get("sparse"))
    if not is_plain or not _is_known(table) or index.dtype != torch.int64:
        return None
    out = torch.empty((*index.shape, table.shape[1]), dtype=table.dtype, device="cpu")
    ops.run(lambda program: add_rows(program, [table, index.contiguous()], [out]))
    return out


_NATIVE: dict[str, Native] = {
    **{name: _elementwise(name, 1) for name in _ONE},
    **{name: _elementwise(name, 2) for name in _TWO},
    **{f"{name}_": _in_place(name) for name in _TWO},
    **{name: _cast for name in (*CASTS, "type")},
    **{name: _cast_to(dtype) for name, dtype in _CAST_TO.items()},
    **{name: _reduction(name) for name in _REDUCTIONS},
    "softmax": _softmax,
    "topk": _greatest,
    "linear": _linear,
    "cat": _join,
    "embedding": _rows,
}
