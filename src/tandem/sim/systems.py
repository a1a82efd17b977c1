"""The systems of the papers as settings of one planner, for comparison at equal GPU memory."""

from functools import partial
from typing import ClassVar, NamedTuple

from tandem.policy.plan import Geometry
from tandem.policy.settings import PlannerSettings, Policies
from tandem.sim.baselines import (
    FirstTokenScore,
    Hinted,
    IndexedCopyOnMiss,
    Popularity,
    ReleasedHybriMoe,
    TokenMemory,
    TopK,
    Transitions,
)
from tandem.sim.exact import Exact
from tandem.sim.exact_overlapped import ExactOverlapped

# llama.cpp moves experts to the GPU for batches of at least this many tokens (its op offload).
LLAMA_STREAM_TOKENS = 32

# The simulator adds oracles, and predictions and prefetches from papers, to Tandem's own policies.
_OWN = PlannerSettings.policies
POLICIES = Policies(
    assignments=_OWN.assignments.extended(
        {
            "exact": Exact,
            "exact-overlapped": ExactOverlapped,
            "hybrimoe-released": ReleasedHybriMoe,
        }
    ),
    evictions=_OWN.evictions.extended(
        {"hybrimoe-released": FirstTokenScore, "indexed-copy-on-miss": IndexedCopyOnMiss}
    ),
    predictions=_OWN.predictions.extended(
        {
            "popularity": Popularity,
            "transitions": Transitions,
            "token-memory": TokenMemory,
            "gate": partial(Hinted, source="gate"),
            "residual": partial(Hinted, source="residual"),
        }
    ),
    prefetches=_OWN.prefetches.extended({"top-k": TopK}),
)


class SimulatedSettings(PlannerSettings):
    """Planner settings that accept any policy that the simulator knows."""

    __slots__ = ()
    policies: ClassVar[Policies] = POLICIES


TANDEM = PlannerSettings(prediction="regression", prefetch_count=2, must_prefetch=False)


class System(NamedTuple):
    """One system: a planner's settings and what its cache holds at the start."""

    name: str
    settings: PlannerSettings
    start: str


def systems(geometry: Geometry) -> list[System]:
    """Return all compared systems, with their settings for a model of this geometry."""
    few = geometry.num_experts < 32
    layer_wise = PlannerSettings(
        assignment="layer-static",
        eviction="static",
        pool="shared",
        never_worse_than_cpu=False,
    )
    streaming = PlannerSettings(
        assignment="layer-static",
        assignment_options=(("stream_from", LLAMA_STREAM_TOKENS * geometry.top_k),),
        eviction="static",
        pool="shared",
        never_worse_than_cpu=False,
    )
    dali = SimulatedSettings(
        assignment="dali",
        eviction="dali-window",
        prediction="residual",
        prefetch="top-k",
        prefetch_count=1 if few else 4,
        never_worse_than_cpu=False,
    )
    hybrimoe = SimulatedSettings(
        assignment="hybrimoe",
        eviction="hybrimoe",
        prediction="gate",
        prefetch="top-k",
        prefetch_count=1,
        never_worse_than_cpu=False,
    )
    fiddler = PlannerSettings(assignment="fiddler", eviction="static", never_worse_than_cpu=False)
    collaborative = PlannerSettings(
        assignment="hits-on-gpu", eviction="copy-on-miss", never_worse_than_cpu=False
    )
    return [
        System("llama.cpp", streaming, "first-layers"),
        System("ktransformers", layer_wise, "first-layers"),
        System("fiddler", fiddler, "hottest"),
        System("hybrimoe", hybrimoe, "random"),
        System("paper 2", collaborative, "empty"),
        System("dali", dali, "random"),
        System("tandem", TANDEM, "random"),
    ]
