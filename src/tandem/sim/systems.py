"""The systems of the papers as settings of one planner, for comparison at equal GPU memory."""

from typing import NamedTuple

from tandem.policy.plan import Geometry
from tandem.policy.settings import PlannerSettings

# llama.cpp moves experts to the GPU for batches of at least this many tokens (its op offload).
LLAMA_STREAM_TOKENS = 32


TANDEM = PlannerSettings(prediction="foresight", prefetch_count=2, must_prefetch=False)


class System(NamedTuple):
    """One system: a planner's settings and what its cache starts with."""

    name: str
    settings: PlannerSettings
    start: str


def systems(geometry: Geometry) -> list[System]:
    """Return all systems for a model."""
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
    dali = PlannerSettings(
        assignment="dali",
        eviction="dali-window",
        prediction="residual",
        prefetch="top-k",
        prefetch_count=1 if few else 4,
        never_worse_than_cpu=False,
    )
    hybrimoe = PlannerSettings(
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
