"""The costs of one machine: CPU, GPU and link seconds, measured elsewhere, read from JSON.

Callers must read and write files themselves: profiles arrive and leave as text. A `HardwareProfile`
is one machine; its `ShapeCosts` hold the times of one model shape; planners index a `CostTable`.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeGuard, TypeVar

from tandem.core.errors import ConfigError, FileFormatError
from tandem.core.registry import nearest_names

T = TypeVar("T")

PROFILE_FORMAT = 1
# In place of a path: times without the host's own work.
NO_HOST = "none"
# Experts fetched for one use that one launch computes, if there are enough slots.
FETCHES_A_LAUNCH = 16
SEGMENTS, GRAPH = "segments", "graph"  # paths


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShapeCosts:
    """Times of one model shape; the tables are read by linear interpolation between `tokens`."""

    shape: str  # e.g. "qwen3-30b-a3b"
    num_moe_layers: int
    num_experts: int
    top_k: int
    expert_bytes: int  # packed, one expert
    tokens: tuple[int, ...]  # the token counts for which the tables below have entries
    cpu_seconds: tuple[float, ...]  # one expert, this many tokens
    gpu_seconds: tuple[float, ...]
    dense_seconds: tuple[float, ...]  # rest of one layer, on the GPU: attention, router, shared
    cpu_first_expert_seconds: float  # added once per layer in which the CPU computes any expert
    link_seconds_per_expert: float
    # The host's, in steps that are one graph; see `HostCosts`.
    second_launch_seconds: float = 0.0
    copy_wake_seconds: float = 0.0
    asking_seconds: float = 0.0
    planned_first_expert_seconds: float = 0.0
    """`cpu_first_expert_seconds` in planned steps; 0: the same value."""

    def __post_init__(self) -> None:
        """Check every field; `ConfigError` names the field, what was found and what is expected."""
        fields = dataclasses.asdict(self)
        _require("shape", self.shape, "a text without control characters", _is_text)
        for name in ("num_moe_layers", "num_experts", "top_k", "expert_bytes"):
            _require(name, fields[name], "an integer of at least 1", _is_count)
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k is {self.top_k}; expected at most {self.num_experts}")
        steps = list(self.tokens)
        if not steps or steps[0] != 1 or any(a >= b for a, b in pairwise(steps)):
            raise ConfigError(f"tokens is {steps}; expected growing counts that start at 1")
        for name in ("cpu_seconds", "gpu_seconds", "dense_seconds"):
            table = fields[name]
            if len(table) != len(steps):
                raise ConfigError(f"{name} has {len(table)} entries; expected {len(steps)}")
            for place, value in enumerate(table):
                _require(
                    f"{name}[{place}]",
                    value,
                    "a time of at least 0 seconds and at most 1e6",
                    _is_seconds,
                )
        for name in (
            "cpu_first_expert_seconds", "link_seconds_per_expert", "second_launch_seconds",
            "copy_wake_seconds", "asking_seconds", "planned_first_expert_seconds",
        ):  # fmt: skip
            _require(name, fields[name], "at least 0 and at most 1e6", _is_seconds)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Seconds of the host's own work on one path, that is, one way of running a decode step."""

    path: str
    """"segments": graph segments with Python between them; "graph": the whole step as one graph."""
    step_seconds: float
    """Once per step: read, sample and copy back the token, launch the step."""
    layer_seconds: float
    """From a router's choice until the GPU computes the layer's experts."""
    cpu_begin_seconds: float
    """Additional time until the CPU computes its first expert."""
    cpu_end_seconds: float
    """From the CPU's last result until the GPU continues."""
    fetch_seconds: float
    """A fetched expert's share of the launch that computes several. A fetch is charged at least
    this time, even if its copy takes less."""
    second_launch_seconds: float = 0.0
    """The second launch of each layer, in a step in one graph that allows fetches; it happens even
    if nothing is fetched."""
    copy_wake_seconds: float = 0.0
    """Time to wake a sleeping thread, before and after each fetch within a graph."""
    asking_seconds: float = 0.0
    """Running the next layer's router ahead in one graph, per layer; 0: not measured."""

    def __post_init__(self) -> None:
        """Check every field; `ConfigError` names the field, what was found and what is expected."""
        if not isinstance(self.path, str) or not self.path:
            raise ConfigError(f"path is {self.path!r}; expected the name of a way, such as 'graph'")
        times = dataclasses.asdict(self)
        del times["path"]
        for name, value in times.items():
            _require(name, value, "a time of at least 0", _is_time)


_PAGE_BYTES = 4096  # experts begin at multiples of it


def whole_pages(num_bytes: int) -> int:
    """Return an expert's bytes rounded up to whole pages, as occupied in files and host slots."""
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DiskCosts:
    """Random-read rates, by queue depth, of the disk that holds a model's files."""

    reads: str
    """"direct" bypasses the system's page cache; "buffered" if the file system refuses direct
    reads."""
    piece_bytes: int  # per read
    depths: tuple[int, ...]  # reads at once
    bytes_per_second: tuple[float, ...]  # of all reads together, by depth

    def __post_init__(self) -> None:
        """Check every field; `ConfigError` names the field, what was found and what is expected."""
        known = ("direct", "buffered")
        _require("reads", self.reads, "direct or buffered", lambda value: value in known)
        _require("piece_bytes", self.piece_bytes, "an integer of at least 1", _is_count)
        if not self.depths or len(self.depths) != len(self.bytes_per_second):
            raise ConfigError(
                f"bytes_per_second has {len(self.bytes_per_second)} entries for {len(self.depths)} "
                "depths; expected one for each, and at least one"
            )
        for depth, rate in zip(self.depths, self.bytes_per_second, strict=True):
            _require("depths", depth, "integers of at least 1", _is_count)
            _require("bytes_per_second", rate, "rates above 0", lambda x: _is_time(x) and x != 0)

    @property
    def most_bytes_per_second(self) -> float:
        """The rate at the queue depth that reads fastest."""
        return max(self.bytes_per_second)

    def read_seconds(self, expert_bytes: int) -> float:
        """Return the seconds to read one expert if the disk always has the fastest queue depth."""
        return whole_pages(expert_bytes) / self.most_bytes_per_second


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """One machine: memories, mutual slowdown of CPU and link, and times by model shape."""

    name: str
    source: str  # where each number comes from
    cpu: str
    gpu: str
    cpu_threads: int
    gpu_memory_bytes: int
    host_memory_bytes: int
    link_bytes_per_second: float
    cpu_slowdown_while_copying: float  # factor on CPU time while the link is busy, at least 1
    link_slowdown_while_computing: float  # factor on copies while the CPU computes, at least 1
    shapes: tuple[ShapeCosts, ...]  # without the host's own work
    host: tuple[HostCosts, ...] = ()  # by path, the default first
    disk: DiskCosts | None = None  # of the disk with the model's files; None: not measured
    format: int = PROFILE_FORMAT

    def __post_init__(self) -> None:
        """Check every field; `ConfigError` names the field, what was found and what is expected."""
        if self.format != PROFILE_FORMAT:
            raise ConfigError(f"format is {self.format!r}; expected {PROFILE_FORMAT}")
        fields = dataclasses.asdict(self)
        for name in ("name", "source", "cpu", "gpu"):
            _require(name, fields[name], "a text without control characters", _is_text)
        for name in ("cpu_threads", "gpu_memory_bytes", "host_memory_bytes"):
            _require(name, fields[name], "an integer of at least 1", _is_count)
        rate = self.link_bytes_per_second
        if not _is_time(rate) or rate == 0:
            raise ConfigError(f"link_bytes_per_second is {rate!r}; expected more than 0")
        for name in ("cpu_slowdown_while_copying", "link_slowdown_while_computing"):
            _require(name, fields[name], "a factor of at least 1", _is_factor)
        if not self.shapes:
            raise ConfigError("shapes is empty; expected the costs of at least one model shape")

    def shape(self, name: str) -> ShapeCosts:
        """Return the costs of a model shape.

        For a shape that the profile lacks, `ConfigError` lists the nearest names.
        """
        for costs in self.shapes:
            if costs.shape == name:
                return costs
        known = [costs.shape for costs in self.shapes]
        hint = nearest_names(name, known)
        raise ConfigError(f"profile {self.name!r} has no costs for the shape {name!r}; {hint}")

    def host_costs(self, path: str | None = None) -> HostCosts | None:
        """Return the host costs of a path; without `path`, of the profile's default path.

        Returns None for `NO_HOST`, and without `path` if the profile has no host costs. For a path
        that the profile lacks, `ConfigError` lists the nearest names.
        """
        if path == NO_HOST or (path is None and not self.host):
            return None
        known = {costs.path: costs for costs in self.host}
        if path is not None and path not in known:
            hint = nearest_names(path, [*known, NO_HOST])
            raise ConfigError(f"profile {self.name!r} has no host costs for {path!r}; {hint}")
        return self.host[0] if path is None else known[path]

    def charged(
        self, shape: ShapeCosts, path: str | None = None, *, is_resident: bool = False
    ) -> ShapeCosts:
        """Return a shape's times with the host's work added; `host_costs` looks up `path`.

        `is_resident` says that the host takes part in no layer of a decode step, because all
        experts are on the GPU. Prompts are planned whatever the path of decode steps is, so
        `planned_first_expert_seconds` always includes the host's work between graph segments.
        """
        host = self.host_costs(path)
        if host is None:
            return shape
        segments = next((costs for costs in self.host if costs.path == SEGMENTS), host)
        planned = segments.cpu_begin_seconds + segments.cpu_end_seconds
        layer = host.step_seconds / shape.num_moe_layers
        layer += 0.0 if is_resident else host.layer_seconds
        on_cpu = host.cpu_begin_seconds + host.cpu_end_seconds
        return dataclasses.replace(
            shape,
            dense_seconds=tuple(seconds + layer for seconds in shape.dense_seconds),
            cpu_first_expert_seconds=shape.cpu_first_expert_seconds + on_cpu,
            link_seconds_per_expert=max(shape.link_seconds_per_expert, host.fetch_seconds),
            second_launch_seconds=host.second_launch_seconds,
            copy_wake_seconds=host.copy_wake_seconds,
            asking_seconds=host.asking_seconds,
            planned_first_expert_seconds=shape.cpu_first_expert_seconds + planned,
        )

    def to_json(self) -> str:
        """Write the profile as JSON text that `from_json` reads back to an equal profile."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str) -> "HardwareProfile":
        """Return the profile that a JSON text describes.

        `FileFormatError` names `where`, the field, what was found and what is expected.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FileFormatError(f"{where}: not JSON ({error}); expected a profile") from None
        if not isinstance(values, dict):
            found = type(values).__name__
            raise FileFormatError(f"{where}: found a JSON {found}; expected an object")
        costs: dict[str, object] = {
            "shapes": _build_all(ShapeCosts, values.get("shapes"), f"{where}: shapes"),
            "host": _build_all(HostCosts, values.get("host", []), f"{where}: host"),
        }
        if values.get("disk") is not None:
            costs["disk"] = _build(DiskCosts, values["disk"], f"{where}: disk")
        return _build(cls, values | costs, where)


def _build_all(kind: type[T], values: object, where: str) -> tuple[T, ...]:
    if not isinstance(values, list):
        raise FileFormatError(f"{where} is {values!r}; expected a list of objects")
    return tuple(_build(kind, value, f"{where}[{i}]") for i, value in enumerate(values))


def _build(kind: type[T], values: object, where: str) -> T:
    if not isinstance(values, dict):
        raise FileFormatError(f"{where}: found {values!r}; expected an object")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise FileFormatError(f"{where}: unknown key {key!r}; {nearest_names(key, [*fields])}")
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING:
            raise FileFormatError(f"{where}: {name} is missing; expected it beside {[*values][:3]}")
    plain = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    lists = ("tokens", "cpu_seconds", "gpu_seconds", "dense_seconds", "depths", "bytes_per_second")
    for name in lists:
        if name in fields and not isinstance(plain[name], tuple):
            raise FileFormatError(f"{where}: {name} is {plain[name]!r}; expected a list")
    if "tokens" in fields and not all(map(_is_count, plain["tokens"])):
        raise FileFormatError(f"{where}: tokens is {plain['tokens']!r}; expected integers >= 1")
    try:
        return kind(**plain)
    except ConfigError as error:
        raise FileFormatError(f"{where}: {error}") from None


def _is_number(value: object) -> TypeGuard[float]:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) < math.inf  # also false for integers that are too large for a float


def _is_time(value: object) -> bool:
    return _is_number(value) and value >= 0


def _is_seconds(value: object) -> bool:
    return _is_number(value) and 0 <= value <= 1e6  # sums of larger times would not be finite


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not any(ord(letter) < 32 for letter in value)


def _is_factor(value: object) -> bool:
    return _is_number(value) and value >= 1


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 1 << 63


def _require(name: str, value: object, expected: str, holds: Callable[[object], bool]) -> None:
    if not holds(value):
        raise ConfigError(f"{name} is {value!r}; expected {expected}")


def interpolate(tokens: Sequence[int], seconds: Sequence[float], count: int) -> float:
    """Return a table's seconds at a token count, interpolated between its entries.

    Beyond the last entry the last segment's slope continues; 0 tokens take 0 seconds.
    """
    if count <= 0:
        return 0.0
    if len(tokens) == 1:
        return seconds[0] * count
    right = next((i for i, t in enumerate(tokens) if t >= count), len(tokens) - 1)
    right = max(right, 1)
    t0, t1 = tokens[right - 1], tokens[right]
    s0, s1 = seconds[right - 1], seconds[right]
    return max(0.0, s0 + (s1 - s0) * (count - t0) / (t1 - t0))


class CostTable:
    """A shape's times as lists by token count, so that a planner only indexes."""

    def __init__(
        self,
        costs: ShapeCosts,
        *,
        link_slowdown: float = 1.0,
        cpu_slowdown: float = 1.0,
        read_seconds: float = 0.0,
    ) -> None:
        """Expand the tables; `link`, the seconds of a copy, includes the factor `link_slowdown`.

        `cpu_slowdown` is the factor on CPU times while the link is busy; it is not in the tables.
        `read_seconds` is the time to read one expert from a disk.
        """
        self.costs = costs
        self.link_slowdown, self.cpu_slowdown = link_slowdown, cpu_slowdown
        self.cpu: list[float] = [0.0]
        self.gpu: list[float] = [0.0]
        self.cpu_first = costs.cpu_first_expert_seconds
        self.planned_first = costs.planned_first_expert_seconds or self.cpu_first
        self.link = costs.link_seconds_per_expert * link_slowdown
        self.second_launch, self.copy_wake = costs.second_launch_seconds, costs.copy_wake_seconds
        self.asking, self.read = costs.asking_seconds, read_seconds
        self._grow(64)

    def require(self, tokens: int) -> None:
        """Extend `cpu` and `gpu` so that they can be indexed by up to `tokens` tokens."""
        if tokens >= len(self.cpu):
            self._grow(2 * tokens)

    def _grow(self, tokens: int) -> None:
        steps = self.costs.tokens
        for count in range(len(self.cpu), tokens + 1):
            self.cpu.append(interpolate(steps, self.costs.cpu_seconds, count))
            self.gpu.append(interpolate(steps, self.costs.gpu_seconds, count))

    def dense(self, tokens: int) -> float:
        """Return the seconds of one layer without its routed experts."""
        return interpolate(self.costs.tokens, self.costs.dense_seconds, tokens)
