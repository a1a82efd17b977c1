"""What the executor reports. Statistics, traces and metrics are folds over these events."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tandem.policy.plan import Copy, LayerLoad, LayerPlan


class LayerExecuted(NamedTuple):
    """One MoE layer has been computed for one step."""

    layer: int
    num_tokens: int
    num_active_experts: int
    num_expert_rows: int
    """The number of routed tokens: computed (token, expert) pairs."""
    touched_bytes: int
    """The bytes of the active experts' weights."""
    load: LayerLoad | None = None
    """The load that was planned; None without a planner."""
    plan: LayerPlan | None = None
    """The plan that was executed; None without a planner."""
    step_copies: tuple[Copy, ...] = ()
    """Prefetches issued at the beginning of the step; only in the event of its first layer."""
    begin_seconds: float = 0.0
    """When the layer was planned, on the planner's clock."""
    end_seconds: float = 0.0
    plan_seconds: float = 0.0
    """Wall time of planning."""
    chosen: Tensor | None = None
    """If `load` is None: the router's choice (n_tokens, top_k), valid only during the call."""


Listener = Callable[[LayerExecuted], None]


@dataclass(slots=True)
class ExpertStatistics:
    """Sums over the events of a run; add it to an executor's listeners."""

    touched_bytes: int = 0
    separate_bytes: int = 0
    """Bytes that would be read if no tokens of a step shared experts."""
    active_experts: int = 0
    expert_rows: int = 0

    def __call__(self, event: LayerExecuted) -> None:
        """Add one event to the sums."""
        self.touched_bytes += event.touched_bytes
        each = event.touched_bytes // max(1, event.num_active_experts)
        self.separate_bytes += event.num_expert_rows * each
        self.active_experts += event.num_active_experts
        self.expert_rows += event.num_expert_rows
