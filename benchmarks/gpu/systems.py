"""The systems compared on a GPU: Tandem and other ways to run the model, as planner settings.

All systems use the same kernels, link and captured steps; they differ in their decisions.
"""

from typing import NamedTuple

from tandem.hf.config import OffloadConfig
from tandem.sim.systems import SimulatedSettings


class SimulatedConfig(OffloadConfig):
    """Options with any policy that the simulator knows."""

    planner = SimulatedSettings


class System(NamedTuple):
    """A name and its options."""

    name: str
    options: dict[str, object]


TANDEM = System("tandem", {})
BASELINES = (
    # A graph break at the experts of each layer, with Python between.
    System("segments", {"decode_graph": False}),
    System("all-cpu", {"assignment": "cpu-only", "prediction": "none", "prefetch": "none"}),
    System(
        "hits-gpu-misses-cpu",
        {"assignment": "hits-on-gpu", "eviction": "lru", "prediction": "none", "prefetch": "none"},
    ),
    System(
        "paper-2",
        {
            "assignment": "hits-on-gpu", "eviction": "copy-on-miss", "prediction": "none",
            "prefetch": "none", "start_content": "none",
        },
    ),
    System(
        "dali",
        {
            "assignment": "dali", "eviction": "dali-window", "prediction": "residual",
            "prefetch": "top-k", "prefetch_count": 4, "start_content": "random",
        },
    ),
    System(
        "on-demand",
        {"assignment": "gpu-only", "eviction": "lru", "prediction": "none", "prefetch": "none"},
    ),
)  # fmt: skip
