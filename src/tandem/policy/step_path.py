"""The path of decode steps on a GPU: planned layer by layer, or one graph.

A step in one graph runs without Python, and hits that the device has published stay on the device.
So it supports only some options (`PlannerSettings.why_planned`); with other options, steps are
planned or the path is refused.
"""

from typing import NamedTuple

from tandem.core.errors import ConfigError
from tandem.policy.cost import GRAPH, NO_HOST, SEGMENTS, HardwareProfile

MAX_GRAPH_TOKENS = 8  # in a step that is one graph; larger steps are planned
CAPTURE_SIZES = (1, 2, 4, MAX_GRAPH_TOKENS)  # padding tokens fill steps of other sizes


def capture_size(num_tokens: int) -> int:
    """Return the smallest capture size of at least `num_tokens` (at most 8) tokens."""
    return next(size for size in CAPTURE_SIZES if size >= num_tokens)


class StepPath(NamedTuple):
    """One path of decode steps."""

    host_path: str
    """The path in a profile whose host costs apply."""
    in_graph: bool
    """Whether small decode steps run as one graph."""


PLAIN_PATH = StepPath(NO_HOST, in_graph=False)


def run_path(profile: HardwareProfile, why_planned: str | None) -> StepPath:
    """Return the path of a run's decode steps, where the user requests none.

    The path is one graph if the profile has host costs for one graph and `why_planned` is None;
    otherwise it is the default path, as from `step_path`.
    """
    is_known = any(costs.path == GRAPH for costs in profile.host)
    return step_path(profile, GRAPH if is_known and why_planned is None else None, why_planned)


def step_path(profile: HardwareProfile, requested: str | None, why_planned: str | None) -> StepPath:
    """Return the requested path; without `requested`, the profile's default path.

    `why_planned` names an option that one graph cannot follow: the default is then the path of
    planned steps, and a request for one graph raises `ConfigError`.
    """
    host = profile.host_costs(requested)
    if host is None:
        return PLAIN_PATH
    if host.path != GRAPH or why_planned is None:
        return StepPath(host.path, in_graph=host.path == GRAPH)
    if requested is not None:
        raise ConfigError(
            f"host_path is {GRAPH!r}, and a decode step in one graph cannot follow {why_planned}; "
            f"leave that out, or take host_path {SEGMENTS!r}"
        )
    is_known = any(costs.path == SEGMENTS for costs in profile.host)
    return StepPath(SEGMENTS if is_known else GRAPH, in_graph=False)
