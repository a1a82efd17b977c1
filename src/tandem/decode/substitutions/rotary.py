"""Rotary embeddings in one pass, in place of the function that models call for them.

Prompts on the CPU use this; where pairs of neighbours are rotated, a GPU's decode steps use it too.
The model's function is found by its name and parameters. It is replaced if it rotates random heads
as the kernels do: by halves (of whole heads or their first values), or by pairs of neighbours (the
last values of a head).
"""

import functools
import inspect
import sys
from typing import Any

import torch
from torch import Tensor

from tandem.decode.substitutions.prompt_operations import active_operations
from tandem.decode.substitutions.substitution import Function, instead
from tandem.foreign_types import ModelPart
from tandem.kv_cache.base import current_cache
from tandem.kv_cache.cuda.cache import StaticKvCache


def rotary_like(own: Function) -> Function | None:
    """Return a replacement of `own`, a model's `apply_rotary_pos_emb`, or None.

    None if the kernels do not rotate as `own` does. The replacement returns None for arguments with
    which `own` must be called instead.
    """
    names = tuple(inspect.signature(own).parameters)
    turned = names[: names.index("cos")] if "cos" in names else ()
    if names[len(turned) : len(turned) + 2] != ("cos", "sin"):
        return None
    trusted = [
        is_partial
        for is_partial in (False, True)
        if _turns_halves(own, len(turned), is_partial=is_partial)
    ]
    turns_pairs = not trusted and _turns_pairs(own, len(turned))

    def rotate(*args: Any, **kwargs: Any) -> Any:
        ops, on_gpu = active_operations(), turns_pairs and _has_gpu_kernels()
        arguments = dict(zip(names, args, strict=False)) | kwargs
        heads = arguments.get("unsqueeze_dim", 1)
        if heads not in (1, 2) or not {*turned, "cos", "sin"} <= arguments.keys():
            return None
        cos, sin = arguments["cos"], arguments["sin"]
        parts: list[Tensor] = [arguments[name] for name in turned]
        if on_gpu:
            results = [_rotated_on_gpu(x, cos, sin, heads) for x in parts]
        elif ops is None:
            return None
        elif turns_pairs:
            results = [ops.rotate_pairs(x, cos, sin, heads) for x in parts]
        elif (cos.shape[-1] < parts[0].shape[-1]) in trusted:
            results = [ops.rotate(x, cos, sin, heads) for x in parts]
        else:
            return None
        if any(result is None for result in results):
            return None
        return results[0] if len(results) == 1 else tuple(results)

    return rotate if trusted or turns_pairs else None


def _has_gpu_kernels() -> bool:
    cache = current_cache()
    return isinstance(cache, StaticKvCache) and cache.is_decoding and cache.has_kernels


def _rotated_on_gpu(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor | None:
    """Return `x` rotated by one kernel; None if the kernel cannot read the shapes.

    `x` is (b, heads, n, dim) or (b, n, heads, dim); `heads` is the dimension of the heads, 1 or 2.
    """
    from tandem.triton_kernels import operations

    if x.dim() != 4 or x.shape[3] % 2:
        return None
    table = len(x), x.shape[3 - heads], cos.shape[-1]
    if cos.shape != table or sin.shape != table:
        return None
    result: Tensor = operations.rotate_pairs(x, cos, sin, heads)
    return result


def rotary_of(module: ModelPart) -> Function:
    """Return `apply_rotary_pos_emb` of the file that defines a module, replaced if possible."""
    return _with_native(vars(sys.modules[type(module).__module__])["apply_rotary_pos_emb"])


@functools.cache
def _with_native(own: Function) -> Function:
    ours = rotary_like(own)
    return own if ours is None else instead(own, ours)


def _turns_halves(own: Function, count: int, *, is_partial: bool) -> bool:
    """Test a function: return whether it rotates heads of eight values by halves.

    With `is_partial`, it must rotate the first four values only.
    """
    x, cos, sin, results = _tried(own, count, 4 if is_partial else 8)
    rotated = cos.shape[-1]
    turned, rest = x[..., :rotated], x[..., rotated:]
    low, high = turned.chunk(2, dim=-1)
    swapped = torch.cat((-high, low), dim=-1)
    expected = torch.cat((turned * cos[:, None] + swapped * sin[:, None], rest), dim=-1)
    return _are_all(results, count, expected)


def _turns_pairs(own: Function, count: int) -> bool:
    """Test a function: return whether it rotates the last four values of heads as two pairs."""
    x, cos, sin, results = _tried(own, count, 2)
    pairs = torch.view_as_complex(x[..., 4:].unflatten(-1, (2, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.complex(cos, sin)[:, None]).flatten(-2)
    return _are_all(results, count, torch.cat((x[..., :4], turned), dim=-1))


def _tried(own: Function, count: int, width: int) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Call `own` with random heads, and random `cos` and `sin` of `width`; return all tensors.

    These are the heads, `cos`, `sin`, and a list of the results, which is empty if `own` fails.
    `count` is the number of tensors that `own` rotates.
    """
    random = torch.Generator().manual_seed(0)
    x = torch.randn((1, 2, 3, 8), generator=random, device="cpu")
    cos, sin = (torch.randn((1, 3, width), generator=random, device="cpu") for _ in range(2))
    try:
        found = own(*[x] * count, cos=cos, sin=sin)
    except (TypeError, RuntimeError, ValueError):  # the function takes other arguments
        return x, cos, sin, []
    return x, cos, sin, [found] if isinstance(found, Tensor) else list(found)


def _are_all(results: list[Tensor], count: int, expected: Tensor) -> bool:
    return len(results) == count and all(
        y.shape == expected.shape and torch.allclose(y, expected) for y in results
    )
