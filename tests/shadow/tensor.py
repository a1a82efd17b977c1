"""Tensors that say `cuda:0`, hold host values, and refuse what a GPU refuses."""

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from tests.shadow.gpu import ShadowGpu
from tests.shadow.order import Memory

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
# The current GPU: operations have no other way to find it.
_PRESENT: list[ShadowGpu] = []

_COPIES = {"copy_", "_to_copy"}
_INDEXED = {"index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index"}
_WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "equal", "is_nonzero", "bincount", "repeat_interleave",
}  # fmt: skip
_ALLOCATING = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
# Code that may read a device address, which is useless on the host.
_MAY_ASK_ADDRESSES = (
    "tandem.devices.cuda",
    "tandem.experts.cache",
    "tandem.triton_kernels",
    "tandem.kv_cache.cuda",
    "tandem.hf.lookahead.routers",  # compares them alone
    "triton",
    "torch",
    "tests",
)


def present() -> ShadowGpu:
    """Return the current GPU."""
    return _PRESENT[-1]


class Shadow(Tensor):
    """A tensor of the GPU."""

    held: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Shadow":
        shadow: Shadow = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=CUDA, requires_grad=False,
        )  # fmt: skip
        shadow.held, shadow.memory = inner, present().memory_of(inner)
        return shadow

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return operate(function, args, kwargs or {})

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"shadow of {self.held!r}"

    def data_ptr(self) -> int:
        caller = sys._getframe(1).f_globals["__name__"]
        if not caller.startswith(_MAY_ASK_ADDRESSES):
            present().fault("code for the host's memory asks for an address on the GPU")
        return self.held.data_ptr()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def numpy(self, **options: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")

    def tolist(self) -> Any:
        present().wait("tolist")
        return self.held.tolist()

    def record_stream(self, stream: Any) -> None:
        self.memory.noted_for.add(stream.number)

    def pin_memory(self, device: Any = None) -> Tensor:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be")

    def is_pinned(self, device: Any = None) -> bool:
        return False

    @property
    def data(self) -> Tensor:
        return Shadow(self.held)

    @data.setter
    def data(self, other: Tensor) -> None:
        assert isinstance(other, Shadow), "data of another device"
        assert other.shape == self.shape, "data of another shape"
        self.held, self.memory = other.held, other.memory

    def __deepcopy__(self, memo: Any) -> "Shadow":
        copy = self.detach().clone()
        if isinstance(self, nn.Parameter):
            copy = nn.Parameter(copy, requires_grad=self.requires_grad)
        memo[id(self)] = copy
        return copy  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a tensor of the GPU is pickled")


class ShadowMode(TorchDispatchMode):
    """Intercepts every operation of a thread, so that `device="cuda"` makes GPU tensors."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (parts := _parts(function)) is not None:
            with self:  # which must continue to be intercepted
                return parts(*args, **kwargs)
        return operate(function, args, kwargs)


class _Devices(TorchFunctionMode):
    """Converts device numbers to devices, for which torch would need a CUDA build."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.device and args and isinstance(args[0], int):
            return CUDA
        kwargs = kwargs or {}
        if type(kwargs.get("device")) is int:
            kwargs = {**kwargs, "device": CUDA}
        if function is torch.tensor:  # of numbers on the GPU; the host waits for each
            args = tree_map_only(Shadow, lambda each: each.item(), args)
        if function is Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = args[0], CUDA, *args[2:]
        return function(*args, **kwargs)


@contextmanager
def met() -> Iterator[None]:
    """Intercept a thread's operations while the context is open."""
    with ShadowMode(), _Devices():  # type: ignore[no-untyped-call]
        yield


def operate(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation of torch on its tensors' device."""
    if (parts := _parts(function)) is not None:
        return parts(*args, **kwargs)
    name, device = function._schema.name.partition("::")[2], kwargs.get("device")
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    is_here = any(isinstance(each, Shadow) for each in tensors)
    is_named = device is not None and torch.device(device).type == "cuda"
    if not is_here and not is_named:
        return _on_host(function, name, args, kwargs, tensors)
    if name in _COPIES:
        return _copy(function, name, args, dict(kwargs))
    _refuse_mixed(name, args, tensors)
    waits = name in _WAITING or _has_mask(name, args)
    if waits:
        present().wait(name)
    given = {**kwargs, "device": CPU} if device is not None else kwargs
    if name == "_fused_sdp_choice":
        return 0  # in plain operations: the others differ by device
    results = on_device(function, name, args, given)
    if waits:
        present().has_waited()
    if device is not None and not is_named:  # new_zeros(device="cpu") and the like
        return results
    if _effects(function)[1] and not args[0].is_inference():
        with torch.inference_mode(False):  # a view of an ordinary tensor is one
            return _wrapped(results, args, kwargs)
    return _wrapped(results, args, kwargs)


@torch.inference_mode(False)  # values are ordinary tensors; their wrappers are GPU tensors
@torch.no_grad()
def on_device(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run or record an operation on the values, in the current stream's order."""
    gpu = present()
    moment = gpu.begin_work(name)
    inner_args, inner_kwargs = tree_map_only(Shadow, lambda each: each.held, (args, kwargs))
    if name in _ALLOCATING:
        made = function(*inner_args, **inner_kwargs)
        gpu.poison(made)
        return made
    written, is_view = _effects(function)
    if is_view:
        return function(*inner_args, **inner_kwargs)
    capture = gpu.capture
    if capture is None:
        gpu.worker.join()
    uses = list(_uses(function, inner_args, inner_kwargs, written))
    if capture is None:
        for tensor, writes in uses:
            gpu.use(tensor, moment, name, writes=writes)
        results = function(*inner_args, **inner_kwargs)
    else:
        results = capture.note(function, inner_args, inner_kwargs, uses)
    for result in tree_leaves(results):
        if isinstance(result, Tensor) and capture is None:
            _hold_new(gpu, result, moment, name)
    return results


def _hold_new(gpu: ShadowGpu, result: Tensor, moment: Any, name: str) -> None:
    known = gpu.memory_of(result)  # counted even if nobody wraps it
    if not known.uses:
        gpu.use(result, moment, name, writes=True)


def _on_host(
    function: Any, name: str, args: Any, kwargs: dict[str, Any], tensors: Sequence[Tensor]
) -> Any:
    gpu = present()
    if kwargs.get("pin_memory"):
        made = function(*args, **{**kwargs, "pin_memory": False})
        gpu.poison(made)
        return pinned(made)
    written, is_view = _effects(function)
    if not is_view and tensors:
        for tensor, writes in _uses(function, args, kwargs, written):
            gpu.host_uses(tensor, name, writes=writes)
    return function(*args, **kwargs)


def pinned(memory: Tensor) -> Tensor:
    """Return a new pinned host tensor."""
    gpu, storage = present(), memory.untyped_storage()
    if storage.nbytes():
        gpu.pin(storage.data_ptr(), storage.nbytes(), owner=memory)  # its address is not used again
    return memory


def _copy(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gpu = present()
    if name == "copy_":
        target, source = args[0], args[1]
        is_async = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        _between(gpu, isinstance(target, Shadow), source, target, is_async)
        moment_args = tree_map_only(Shadow, lambda each: each.held, args)
        _do_copy(gpu, moment_args[0], moment_args[1])
        if not is_async and not (isinstance(target, Shadow) and isinstance(source, Shadow)):
            gpu.has_waited()
        return target
    source, device = args[0], kwargs.pop("device", None)
    goes = isinstance(source, Shadow) if device is None else torch.device(device).type == "cuda"
    is_async = bool(kwargs.pop("non_blocking", False))
    kwargs.pop("pin_memory", None)
    if goes and isinstance(source, Shadow):
        return _wrapped(on_device(function, name, args, kwargs), args, kwargs)
    with torch.inference_mode(torch.is_inference_mode_enabled() and not goes):
        target = torch.ops.aten.empty_like.default(
            source.held if isinstance(source, Shadow) else source,
            dtype=kwargs.get("dtype"), memory_format=kwargs.get("memory_format"),
        )  # fmt: skip
    if not goes and is_async:
        target = pinned(target)
    _between(gpu, goes, source, target, is_async)
    _do_copy(gpu, target, source.held if isinstance(source, Shadow) else source)
    if not is_async:
        gpu.has_waited()
    return Shadow(target) if goes else target


def _between(gpu: ShadowGpu, goes: bool, source: Tensor, target: Tensor, is_async: bool) -> None:
    """Check a copy between host and device; it is asynchronous only with pinned memory."""
    if isinstance(source, Shadow) and (isinstance(target, Shadow) and goes):
        return
    host = source if goes else target
    if not is_async:
        gpu.wait("a copy")
    elif host.numel() and gpu.pinned_at(host.data_ptr()) is None:
        gpu.fault(f"a copy that does not wait is of unpinned memory {tuple(host.shape)}")


@torch.inference_mode()
def _do_copy(gpu: ShadowGpu, target: Tensor, source: Tensor) -> None:
    moment = gpu.begin_work("copy")
    uses = [(source, False), (target, True)]
    copy = torch.ops.aten.copy_.default
    if gpu.capture is not None:
        gpu.capture.note(copy, (target, source), {}, uses)
        return
    gpu.worker.join()
    for tensor, writes in uses:
        gpu.use(tensor, moment, "copy", writes=writes)
    copy(target, source)


def _refuse_mixed(name: str, args: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
    if name.endswith("_like") or name.startswith("new_"):
        return  # they look at a tensor's form
    others = [each for each in tensors if not isinstance(each, Shadow) and each.dim() > 0]
    if not others:
        return
    if name in _INDEXED and isinstance(args[0], Shadow):
        present().fault(f"{name} of a tensor on the GPU by indices on the CPU, which waits")
    message = f"Expected all tensors to be on the same device, but found cuda:0 and cpu ({name})"
    present().faults.append(f"{name} of tensors on cuda:0 and on the CPU")
    raise RuntimeError(message)


def _has_mask(name: str, args: tuple[Any, ...]) -> bool:
    if name not in _INDEXED:
        return False
    masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
    is_filled = "put" in name and args[2].numel() == 1 and len(args[1]) == 1
    return bool(masks) and not is_filled  # one value at a mask is a fill


def _wrapped(results: Any, args: Any, kwargs: Any) -> Any:
    given = {
        id(each.held): each for each in tree_leaves((args, kwargs)) if isinstance(each, Shadow)
    }

    def wrap(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        return given[id(each)] if id(each) in given else Shadow(each)

    return tree_map(wrap, results)


@functools.cache
def _effects(function: Any) -> tuple[tuple[int | str, ...], bool]:
    """Return the arguments that an operation writes, and whether it is a view."""
    schema = function._schema
    written = tuple(
        argument.name if argument.kwarg_only else place
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    is_view = not written and any(result.alias_info is not None for result in schema.returns)
    return written, is_view


def _uses(function: Any, args: Any, kwargs: Any, written: tuple[int | str, ...]) -> Any:
    for place, argument in [*enumerate(args), *kwargs.items()]:
        if isinstance(argument, Tensor):
            yield argument, place in written
        elif isinstance(argument, (list, tuple)):
            for each in argument:
                if isinstance(each, Tensor):
                    yield each, place in written


@functools.cache
def _parts(function: Any) -> Any:
    """Return a composite operation's own implementation: Tandem's, or torch's.

    In inference mode torch does not decompose them.
    """
    from torch._library.custom_ops import OPDEFS

    if str(function) == "aten.mm.dtype":  # which only a GPU has
        return lambda x, y, dtype: x.to(dtype) @ y.to(dtype)
    if function._schema.name in OPDEFS:
        return OPDEFS[function._schema.name]._init_fn
    is_made = torch._C._dispatch_has_kernel_for_dispatch_key(
        function.name(), "CompositeImplicitAutograd"
    )
    return function.decompose if is_made else None
