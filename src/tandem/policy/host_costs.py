"""What the host does around the layers of a step on a GPU, while GPU or CPU wait for it."""

import dataclasses
import math

from tandem.core.errors import ConfigError

# Experts that are fetched for one use are computed so many in one launch, where slots allow.
FETCHES_A_LAUNCH = 8
SEGMENTS, GRAPH = "segments", "graph"  # paths


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Seconds of the host's own work, for one way in which a step hands layers over."""

    path: str
    """"segments": graph segments with Python between them; "graph": the whole step in one."""
    step_seconds: float
    """Once a step: the token is read, sampled and brought back, the step launched."""
    layer_seconds: float
    """A layer's router has chosen -> its experts are at work on the GPU."""
    cpu_begin_seconds: float
    """On top, until the first expert on the CPU is at work."""
    cpu_end_seconds: float
    """The CPU's last row is computed -> the GPU goes on with it."""
    fetch_seconds: float
    """A fetched expert's part of the launch of its group: it takes at least so long."""

    def __post_init__(self) -> None:
        """Check every field; `ConfigError` names the field, what was found and what is expected."""
        if not isinstance(self.path, str) or not self.path:
            raise ConfigError(f"path is {self.path!r}; expected the name of a way, such as 'graph'")
        times = dataclasses.asdict(self)
        del times["path"]
        for name, value in times.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name} is {value!r}; expected a time of at least 0")
