"""Rotary embeddings of prompts in one pass, in place of the function that models call for them.

The function is known by its name and parameters, and trusted when it has turned random heads as the
kernel does: halves against each other, of whole heads or of their first values.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tandem.decode.prompt_operations import active_operations

Function = Callable[..., Any]


def rotate_prompt(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Do what a model's `apply_rotary_pos_emb` does, which is `original`."""
    ops = active_operations()
    names = _parameters(original) if ops is not None else ()
    given = dict(zip(names, args, strict=False)) | kwargs
    heads = given.get("unsqueeze_dim", 1)
    if ops is None or "cos" not in given or heads not in (1, 2):
        return original(*args, **kwargs)
    cos, sin = given["cos"], given["sin"]
    parts: list[Tensor] = [given[name] for name in _turned(names)]
    if not _turns_halves(original, is_partial=cos.shape[-1] < parts[0].shape[-1]):
        return original(*args, **kwargs)
    results = [ops.rotate(x, cos, sin, heads) for x in parts]
    if any(result is None for result in results):
        return original(*args, **kwargs)
    return results[0] if len(results) == 1 else tuple(results)


@functools.cache
def _parameters(original: Function) -> tuple[str, ...]:
    return tuple(inspect.signature(original).parameters)


def _turned(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the parameters before the tables: what turns."""
    return names[: names.index("cos")]


@functools.cache
def _turns_halves(original: Function, *, is_partial: bool) -> bool:
    """Try a function on two heads of eight values; whether half of them stay as they are."""
    names = _parameters(original)
    count = len(_turned(names))
    if names[count : count + 2] != ("cos", "sin"):
        return False
    random = torch.Generator().manual_seed(0)
    rotated = 4 if is_partial else 8
    x = torch.randn((1, 2, 3, 8), generator=random, device="cpu")
    cos, sin = (torch.randn((1, 3, rotated), generator=random, device="cpu") for _ in range(2))
    try:
        found = original(*[x] * count, cos=cos, sin=sin)
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
