"""Reports which operations of a recorded decode step or a prompt are not native, and their cost.

Adjacent native operations of a step are one call; all other operations run one by one, in torch or
in Python.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tandem.kernels.torch_private import TorchDispatchMode, operator_schema
from tandem.recording.program import NativeCall, memory_of
from tandem.recording.recorded_graph import RecordedGraph

_PROFILE_RUNS = 5
_NAMED_OPERATIONS = 5  # the others are summed up


@dataclass(frozen=True, slots=True)
class NotNative:
    """All calls of one operation that runs in torch or Python."""

    operation: str
    calls: int
    milliseconds: float


class Coverage(NamedTuple):
    """The profile of one decode step."""

    num_calls: int
    """The number of calls of a step: native programs, and operations that are not native."""
    milliseconds: float
    """Time of the step when operations run one by one."""
    native: dict[str, int]
    """The number of native operations by name."""
    not_native: list[NotNative]
    """The operations that are not native, the costliest first."""

    def line(self) -> str:
        """Return a line of text about the operations that are not native."""
        what = f"of the {self.num_calls} calls of a decode step"
        return f"not native: {_costs(self.not_native, what, self.milliseconds)}"


class PromptCoverage(NamedTuple):
    """The torch operations of one prompt, counted and timed."""

    num_tokens: int
    milliseconds: float
    """Time of the prompt without counting."""
    not_native: list[NotNative]
    """The torch operations, the costliest first."""

    def line(self) -> str:
        """Return a line of text about the torch operations."""
        what = f"calls of torch for {self.num_tokens} tokens"
        return f"not native of a prompt: {_costs(self.not_native, what, self.milliseconds)}"


def _costs(not_native: list[NotNative], what: str, milliseconds: float) -> str:
    if not not_native:
        return "nothing"
    calls = sum(o.calls for o in not_native)
    named, rest = not_native[:_NAMED_OPERATIONS], not_native[_NAMED_OPERATIONS:]
    parts = [_part(o.operation, [o]) for o in named]
    parts += [_part(f"{len(rest)} more", rest)] if rest else []
    spent = sum(o.milliseconds for o in not_native)
    return f"{calls} {what}, {spent:.2f} of {milliseconds:.2f} ms: {', '.join(parts)}"


def _part(name: str, operations: list[NotNative]) -> str:
    calls = sum(operation.calls for operation in operations)
    return f"{name} {calls} x ({sum(o.milliseconds for o in operations):.2f} ms)"


def coverage_of(recorded: RecordedGraph) -> Coverage:
    """Run the last decode step again several times, with the same inputs; return its profile.

    Must be called right after that step, before anything else is computed, because the runs write
    to the same positions of the KV cache.
    """
    native: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    total = 0.0
    for operation, taken in recorded.profile(_PROFILE_RUNS):
        total += taken
        if isinstance(operation.function, NativeCall):
            native[operation.name] += 1
        else:
            calls[operation.name] += 1
            seconds[operation.name] += taken  # type: ignore[assignment]
    not_native = _by_cost(calls, seconds)
    return Coverage(recorded.num_calls, total * 1e3, dict(sorted(native.items())), not_native)


def coverage_of_prompt(run: Callable[[], object], num_tokens: int) -> PromptCoverage:
    """Return a prompt's coverage; `run` is called twice: timed, then with operations counted."""
    begin = time.perf_counter()
    run()
    taken = time.perf_counter() - begin
    work = TorchWork()
    with work:
        run()
    return PromptCoverage(num_tokens, taken * 1e3, _by_cost(work.calls, work.seconds))


def _by_cost(calls: Counter[str], seconds: Counter[str]) -> list[NotNative]:
    return [NotNative(name, calls[name], s * 1e3) for name, s in seconds.most_common()]


class TorchWork(TorchDispatchMode):
    """Counts and times the torch operations inside its context, except views and allocations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        """The number of calls of each operation."""
        self.seconds: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        begin = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        schema = operator_schema(func)
        assert schema is not None
        name = schema.name.partition("::")[2]
        is_written = schema.is_mutable and name != "detach_"
        is_new_memory = name.removeprefix("new_").startswith("empty")
        if is_written or not (is_new_memory or _is_view(result, args)):
            self.calls[name] += 1
            self.seconds[name] += time.perf_counter() - begin  # type: ignore[assignment]
        return result


def _is_view(results: object, args: tuple[object, ...]) -> bool:
    """Tell whether all results of an operation share the memory of its first argument."""
    parts = results if isinstance(results, list | tuple) else [results]
    met = {memory_of(x) if isinstance(x, Tensor) else None for x in (*args[:1], *parts)}
    return bool(args) and len(met) == 1 and None not in met
