"""The values that router, planner and executor exchange: a layer's load, and where it is computed.

Experts are named by their ids, never by positions in a list. This file is the planner's whole
interface.
"""

from collections.abc import Sequence
from typing import NamedTuple

# Launches of a layer in one graph. If it may fetch, a second launch computes all fetched experts.
ONCE, TWICE = 1, 2


class ExpertId(NamedTuple):
    """One routed expert: `layer` counts MoE layers from 0, `expert` counts within the layer."""

    layer: int
    expert: int


class Geometry(NamedTuple):
    """A model's numbers of layers and experts, on which decisions depend."""

    num_layers: int  # MoE layers only
    num_experts: int  # routed experts per layer
    top_k: int

    def key(self, layer: int, expert: int) -> int:
        """Return an expert's index among all experts of the model, for per-expert tables."""
        return layer * self.num_experts + expert

    def expert_id(self, key: int) -> ExpertId:
        """Return the expert with this key."""
        return ExpertId(*divmod(key, self.num_experts))


class LayerLoad(NamedTuple):
    """The tokens that one step routed to the experts of one layer; active experts only."""

    layer: int
    experts: tuple[int, ...]  # ascending, each once
    tokens: tuple[int, ...]  # of each expert, at least 1
    weights: tuple[float, ...] = ()  # gate weights of each expert, summed over tokens; may be empty
    routes: Sequence[Sequence[int]] = ()  # experts of each token of the step; may be empty


class Hint(NamedTuple):
    """Another layer's load, predicted before that layer's router has run."""

    source: str  # "gate" (the next router on this hidden state) or "residual" (DALI's correction)
    load: LayerLoad


class Copy(NamedTuple):
    """A copy of one expert's weights into a slot; planning it discards the slot's old content."""

    layer: int
    expert: int
    slot: int
    evicts: ExpertId | None  # what the slot held before


class LayerPlan(NamedTuple):
    """Which processor computes each active expert of a layer, and what the link carries.

    Each active expert is in exactly one of `gpu`, `arriving`, `fetch` and `cpu`. The link serves
    copies in planned order: `fetch`, then `insert`, then `prefetch`. A slot in two entries of
    `fetch` is overwritten once its first expert has run.
    """

    layer: int
    gpu: tuple[int, ...]  # resident and ready: run at once
    arriving: tuple[int, ...]  # resident, copy under way: run when the copy has ended
    fetch: tuple[Copy, ...]  # copy now, in this order, and run each when its copy has ended
    cpu: tuple[int, ...]  # run on the CPU
    insert: tuple[Copy, ...]  # copy for later steps; not used by this layer's computation
    prefetch: tuple[Copy, ...]  # copy for later layers
    gpu_seconds: float  # expected by the planner's own costs
    cpu_seconds: float
    hits: int = 0  # active experts that were resident and ready, on either processor
    launches: int = 0  # of the device, in a step that is one graph; 0 if the step is planned
    asks: bool = False  # whether such a step runs the next layer's router ahead

    @property
    def seconds(self) -> float:
        """The expected seconds until both processors have computed the layer's experts."""
        return max(self.gpu_seconds, self.cpu_seconds)

    def in_launch_order(self) -> tuple[int, ...]:
        """Return all active experts in the order of their launches on the GPU, the CPU's last."""
        if not self.arriving and not self.fetch:
            return (*self.gpu, *self.cpu)
        return (*self.gpu, *self.arriving, *[copy.expert for copy in self.fetch], *self.cpu)

    def all_on_cpu(self, load: LayerLoad) -> "LayerPlan":
        """Return this plan with all experts on the CPU and no copies, but with the old seconds."""
        return self._replace(
            gpu=(), arriving=(), fetch=(), cpu=load.experts, insert=(), prefetch=()
        )
