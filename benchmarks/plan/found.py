"""The results of configurations: JSON lines, and their figures."""

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.plan.draws import Configuration
from benchmarks.plan.verdict import TOLERANCE


@dataclass(slots=True)
class Found:
    """The result of one configuration."""

    text: str
    wrong: list[str] = field(default_factory=list)
    not_tried: str = ""
    """Why the result does not check the plan."""
    memory_ratio: float | None = None
    """Planned memory relative to the measured peak; None under a limit, or after a kill."""
    speed_ratio: float | None = None
    """Forecast decode speed relative to the measured one."""
    planned: dict[str, object] | None = None
    taken: dict[str, object] | None = None

    @property
    def line(self) -> str:
        """One line of text about it."""
        ratio = "" if self.memory_ratio is None else f" memory {self.memory_ratio:.3f}"
        ratio += "" if self.speed_ratio is None else f" speed {self.speed_ratio:.2f}"
        return f"{self.text}:{ratio} {self.not_tried or '; '.join(self.wrong) or 'right'}"


class KeptFinds:
    """The results of an earlier run, in a file of JSON lines that this run extends."""

    def __init__(self, file: Path | None) -> None:
        """Read the file, if there is one; None stores nothing."""
        self._file = file
        self._found: dict[str, Found] = {}
        if file is not None and file.exists():
            for line in file.read_text().splitlines():
                one = json.loads(line)
                self._found[_key(one["configuration"])] = Found(**one["found"])

    def of(self, configuration: Configuration) -> Found | None:
        """Return the result of the same configuration; None: it was not tried."""
        return self._found.get(_key(asdict(configuration)))

    def add(self, configuration: Configuration, found: Found) -> None:
        """Write a line at once."""
        self._found[_key(asdict(configuration))] = found
        if self._file is None:
            return
        line = json.dumps({"configuration": asdict(configuration), "found": asdict(found)})
        with self._file.open("a") as file:
            file.write(line + "\n")


def _key(configuration: dict[str, object]) -> str:
    return json.dumps(configuration, sort_keys=True)


def figures(found: list[Found]) -> dict[str, object]:
    """Return the figures of all results together."""
    memory = [one.memory_ratio for one in found if one.memory_ratio is not None]
    speeds = [one.speed_ratio for one in found if one.speed_ratio is not None]
    return {
        "configurations": sum(not one.not_tried for one in found),
        "right": sum(not (one.wrong or one.not_tried) for one in found),
        "memory_ratios": _spread(memory),
        "memory_within_5_percent": sum(abs(ratio - 1) <= TOLERANCE for ratio in memory),
        "speed_ratios": _spread(speeds),
        "speed_within_20_percent": sum(0.8 <= ratio <= 1.2 for ratio in speeds),
    }


def _spread(ratios: list[float]) -> dict[str, float] | None:
    """Return the number of values, their extremes and the median."""
    if not ratios:
        return None
    return {
        "count": len(ratios), "least": min(ratios), "median": statistics.median(ratios),
        "most": max(ratios),
    }  # fmt: skip
