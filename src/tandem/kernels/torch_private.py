"""The private parts of torch that Tandem calls, each with the public call that it replaces.

Versions in parentheses are those of torch in which the part works as described.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor, nn

# Intercepts each operation below a model's Python code. Only its module is private (2.11 to today);
# torch's own documentation describes it.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

TensorKind = TypeVar("TensorKind", bound=Tensor)


def children_by_name(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's own dictionary of children; callers must not change it (2.11 to today).

    Replaces `named_children`, which takes ten times as long: too long for each layer and step.
    """
    return module._modules


def copy_module(
    module: nn.Module, children: Mapping[nn.Module, nn.Module], attributes: Mapping[str, object]
) -> nn.Module:
    """Return a module with the same tensors and hooks, but other children and attributes.

    `children` must map each child of `module` to that of the copy; `attributes` are set on the
    copy. Replaces `copy.copy`, whose copies share the dictionary of children (2.11 to today).
    """
    copy: nn.Module = object.__new__(type(module))
    vars(copy).update(vars(module))
    # They are bound to the original, and would run it.
    for name in ("forward", "_compiled_call_impl"):
        vars(copy).pop(name, None)
    copy._modules = {
        name: None if child is None else children[child] for name, child in module._modules.items()
    }
    vars(copy).update(attributes)
    return copy


def own_forward_hooks(copy: nn.Module) -> None:
    """Give a copied module its own dictionary of forward hooks.

    Otherwise hooks added to the copy would also run in the original, because copies share the
    dictionary (2.11 to today).
    """
    copy._forward_hooks = copy._forward_hooks.copy()


def end_allocation_to_pool(device_idx: int, pool: object) -> None:
    """End the CUDA allocator's use of a graph's pool, if torch can (2.11 to today can).

    Does what `CUDAGraph.capture_end` omits when it raises. Raises `RuntimeError` if the allocator
    has left the pool already, or never used it.
    """
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        end(device_idx, pool)


def operator_schema(function: object) -> torch._C.FunctionSchema | None:
    """Return torch's schema of an operator; None for other functions.

    The schema tells whether results alias arguments and whether arguments are changed. No public
    call tells this (2.11 to today).
    """
    return getattr(function, "_schema", None)


def without_overrides() -> AbstractContextManager[None]:
    """Return a context manager that turns `__torch_function__` off in its body (2.11 to today).

    Without it, each access to a tensor's shape in the body would pass through the active mode or
    subclass. torch has no public call that leaves a mode temporarily.
    """
    return torch._C.DisableTorchFunction()


def spin_gpu(cycles: int) -> None:
    """Keep the current stream busy for `cycles` clock cycles (2.11 to today).

    Replaces a kernel that only waits; no public call does this.
    """
    torch.cuda._sleep(cycles)


def tensor_without_values(
    kind: type[TensorKind], shape: tuple[int, ...], dtype: torch.dtype
) -> TensorKind:
    """Return a tensor of class `kind` without memory; no public call does this (2.11 to today)."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=dtype)
