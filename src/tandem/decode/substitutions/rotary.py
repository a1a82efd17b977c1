"""Rotary embeddings of prompts in one pass, in place of the function that models call for them.

The function is known by its name and parameters, and trusted when it has turned random heads as the
kernel does: halves against each other, of whole heads or of their first values.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from tandem.decode.substitutions.prompt_operations import active_operations
from tandem.decode.substitutions.substitution import Function


def rotary_like(own: Function) -> Function | None:
    """Return what does what a model's `apply_rotary_pos_emb` does; None: it turns otherwise."""
    names = tuple(inspect.signature(own).parameters)
    turned = names[: names.index("cos")] if "cos" in names else ()
    if names[len(turned) : len(turned) + 2] != ("cos", "sin"):
        return None
    trusted = [
        is_partial
        for is_partial in (False, True)
        if _turns_halves(own, len(turned), is_partial=is_partial)
    ]

    def rotate(*args: Any, **kwargs: Any) -> Any:
        ops = active_operations()
        given = dict(zip(names, args, strict=False)) | kwargs
        heads = given.get("unsqueeze_dim", 1)
        if ops is None or heads not in (1, 2) or not {*turned, "cos", "sin"} <= given.keys():
            return None
        cos, sin = given["cos"], given["sin"]
        parts: list[Tensor] = [given[name] for name in turned]
        if (cos.shape[-1] < parts[0].shape[-1]) not in trusted:
            return None
        results = [ops.rotate(x, cos, sin, heads) for x in parts]
        if any(result is None for result in results):
            return None
        return results[0] if len(results) == 1 else tuple(results)

    return rotate if trusted else None


def _turns_halves(own: Function, count: int, *, is_partial: bool) -> bool:
    """Try a function on heads of eight values; whether half of them stay as they are."""
    random = torch.Generator().manual_seed(0)
    rotated = 4 if is_partial else 8
    x = torch.randn((1, 2, 3, 8), generator=random, device="cpu")
    cos, sin = (torch.randn((1, 3, rotated), generator=random, device="cpu") for _ in range(2))
    try:
        found = own(*[x] * count, cos=cos, sin=sin)
    except (TypeError, RuntimeError, ValueError):  # it takes something else
        return False
    results = [found] if isinstance(found, Tensor) else list(found)
    turned, rest = x[..., :rotated], x[..., rotated:]
    low, high = turned.chunk(2, dim=-1)
    swapped = torch.cat((-high, low), dim=-1)
    expected = torch.cat((turned * cos[:, None] + swapped * sin[:, None], rest), dim=-1)
    return len(results) == count and all(
        y.shape == x.shape and torch.allclose(y, expected) for y in results
    )
