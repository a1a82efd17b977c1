"""The private parts of torch that Tandem calls, each with what it stands in for."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor, nn

# What sees each operation below a model's Python code: public in all but the name of its module
# (2.11 to today), and what torch's own documentation tells of.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

TensorKind = TypeVar("TensorKind", bound=Tensor)


def children_by_name(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's own dictionary of children, for comparing (2.11 to today).

    Stands in for `named_children`, which takes ten times as long, each layer in each step.
    """
    return module._modules


def copy_module(
    module: nn.Module, children: Mapping[nn.Module, nn.Module], attributes: Mapping[str, object]
) -> nn.Module:
    """Return a module with the same tensors and hooks, but other children and attributes.

    Stands in for `copy.copy`, whose copies share the dictionary of children (2.11 to today).
    """
    copy: nn.Module = object.__new__(type(module))
    vars(copy).update(vars(module))
    for name in ("forward", "_compiled_call_impl"):  # bound to the module, which they would run
        vars(copy).pop(name, None)
    copy._modules = {
        name: None if child is None else children[child] for name, child in module._modules.items()
    }
    vars(copy).update(attributes)
    return copy


def own_forward_hooks(copy: nn.Module) -> None:
    """Give a copy hooks of its own: those that it gets from now on are not the original's.

    Stands in for copies that do not share the dictionary of hooks (2.11 to today).
    """
    copy._forward_hooks = copy._forward_hooks.copy()


def end_allocation_to_pool(device_idx: int, pool: object) -> None:
    """Let the CUDA allocator leave a graph's pool, if torch can say so (2.11 to today can).

    Stands in for what `CUDAGraph.capture_end` leaves out when it raises; raises `RuntimeError`
    where the allocator has left the pool or never allocated to it.
    """
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        end(device_idx, pool)


def operator_schema(function: object) -> torch._C.FunctionSchema | None:
    """Return what torch declares of an operator's results; None for other functions.

    Stands in for a public way to ask whether they alias or change arguments (2.11 to today).
    """
    return getattr(function, "_schema", None)


def without_overrides() -> AbstractContextManager[None]:
    """Let no mode or subclass of tensor see what is called (2.11 to today).

    Stands in for a public way to leave a mode's block for a while: each look at a tensor's shape
    would go through it.
    """
    return torch._C.DisableTorchFunction()


def spin_gpu(cycles: int) -> None:
    """Keep the current stream busy for so many cycles; stands in for a kernel (2.11 to today)."""
    torch.cuda._sleep(cycles)


def tensor_without_values(
    kind: type[TensorKind], shape: tuple[int, ...], dtype: torch.dtype
) -> TensorKind:
    """Make a tensor of a subclass without memory, which no public call makes (2.11 to today)."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=dtype)
