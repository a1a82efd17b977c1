"""Derives wrong calls of native functions from valid ones.

python -O -m tests.kernels.wrong_calls runs them all, and prints those that were not refused.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.kernels.binding_cases import Case, cases


def _leaves(value: Any) -> list[Tensor]:
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value] if isinstance(value, Tensor) else []


def _with(value: Any, number: int, leaf: object) -> Any:
    """Return the arguments with one tensor replaced."""
    left = [number]

    def changed(part: Any) -> Any:
        if isinstance(part, list | tuple):
            return type(part)([changed(inner) for inner in part])
        if isinstance(part, Tensor):
            left[0] -= 1
            return leaf if left[0] == -1 else part
        return part

    return changed(value)


def wrong_calls(case: Case) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield (what is wrong, arguments) of calls that must be refused."""
    for number, x in enumerate(_leaves(tuple(case.args))):
        wrong: dict[str, object] = {"elsewhere": x.to("meta"), "a list": x.flatten().tolist()}
        if number not in case.any_type:
            wrong["another type"] = x.to(torch.float64)
        if number not in case.numbers:
            wrong["an address"] = x.data_ptr()
        if number not in case.any_size:
            wrong |= {"too small": x[:-1], "nothing": x[:0]}
        if number not in (*case.any_size, *case.larger):
            wrong["too large"] = torch.cat([x, x])
        if number not in case.any_stride and x.numel() > 1:
            wrong["gaps"] = torch.stack([x, x], -1)[..., 0]
        for name, leaf in wrong.items():
            yield f"tensor {number} is {name}", _with(tuple(case.args), number, leaf)


def hostile_numbers(case: Case) -> Iterator[Sequence[Any]]:
    """Yield calls with extreme numbers; each is refused or has a meaning."""
    for at, value in enumerate(case.args):
        if type(value) is int:
            for number in (-1, 1 << 20, 1 << 40, (1 << 63) - 1):
                yield (*case.args[:at], number, *case.args[at + 1 :])


def complaints(name: str) -> list[str]:
    """Run all wrong calls of a function; return those that were not refused.

    Calls with extreme numbers must only leave the process alive.
    """
    case, found = cases()[name], []
    for what, args in wrong_calls(case):
        try:
            case.call(*args)
        except (TypeError, ValueError):
            continue
        found.append(f"{name}: {what}")
    for args in hostile_numbers(case):
        with contextlib.suppress(TypeError, ValueError, IndexError, MemoryError):
            case.call(*args)
            if case.then is not None:
                case.then()
    return found


def main() -> int:
    """Run all wrong calls of all functions."""
    assert not sys.argv[1:]
    found = [complaint for name in cases() for complaint in complaints(name)]
    print(*found, f"{len(cases())} functions refuse what is wrong", sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
