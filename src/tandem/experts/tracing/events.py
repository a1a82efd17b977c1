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
    """(token, expert) pairs that were computed."""
    touched_bytes: int
    """Expert weights that had to be read."""
    load: LayerLoad | None = None
    """What was planned for; None where nothing plans."""
    plan: LayerPlan | None = None
    """What was carried out."""
    step_copies: tuple[Copy, ...] = ()
    """Copies ahead that were issued when the step began; only with its first layer."""
    begin_seconds: float = 0.0
    """When the layer was planned, by the planner's clock."""
    end_seconds: float = 0.0
    plan_seconds: float = 0.0
    """Real time that planning took."""
    chosen: Tensor | None = None
    """Where there is no load: the router's choice (n_tokens, top_k), to be read during the call."""


Listener = Callable[[LayerExecuted], None]


@dataclass(slots=True)
class ExpertStatistics:
    """Sums over the events of a run; add it to an executor's listeners."""

    touched_bytes: int = 0
    separate_bytes: int = 0
    """What would have been read if no two tokens of a step had shared an expert."""
    active_experts: int = 0
    expert_rows: int = 0

    def __call__(self, event: LayerExecuted) -> None:
        """Fold one event into the sums."""
        self.touched_bytes += event.touched_bytes
        each = event.touched_bytes // max(1, event.num_active_experts)
        self.separate_bytes += event.num_expert_rows * each
        self.active_experts += event.num_active_experts
        self.expert_rows += event.num_expert_rows
