"""Hypothesis strategies for loads, costs and assignment problems."""

from hypothesis import strategies as st

from tandem.policy.assignment.problem import LayerProblem
from tandem.policy.cost import ShapeCosts
from tandem.policy.plan import Geometry, LayerLoad

GEOMETRY = Geometry(num_layers=3, num_experts=8, top_k=2)
TIMES = st.floats(min_value=1e-6, max_value=1e-2)


@st.composite
def problems(draw: st.DrawFn, max_experts: int = 8, *, over_disk: bool = False) -> LayerProblem:
    """Draw a layer with resident and absent experts and copies under way.

    With `over_disk` some of them are in memory, the others on a disk.
    """
    count = draw(st.integers(1, max_experts))
    tokens = draw(st.lists(st.integers(2, 20), min_size=count, max_size=count))
    link = draw(TIMES)
    in_flight = st.floats(min_value=1e-6, max_value=0.05)
    wait = st.one_of(st.just(0.0), st.just(-1.0), in_flight)
    return LayerProblem(
        layer=0,
        experts=list(range(3, 3 + count)),
        tokens=tokens,
        cpu=draw(st.lists(TIMES, min_size=count, max_size=count)),
        gpu=draw(st.lists(TIMES, min_size=count, max_size=count)),
        wait=draw(st.lists(wait, min_size=count, max_size=count)),
        scores=[0.0] * count,
        cpu_first=draw(st.floats(0.0, 1e-3)),
        link=link,
        link_busy=draw(st.floats(0.0, 0.01)),
        max_fetches=draw(st.sampled_from([0, 1, 3, 1 << 30])),
        cpu_slowdown=draw(st.sampled_from([1.0, 1.3, 2.0])),
        link_slowdown=draw(st.sampled_from([1.0, 1.2])),
        read=draw(TIMES) if over_disk else 0.0,
        places=draw(st.binary(min_size=count, max_size=count).map(_places)) if over_disk else b"",
    )


def _places(drawn: bytes) -> bytes:
    return bytes(place % 3 for place in drawn)


@st.composite
def loads(draw: st.DrawFn, geometry: Geometry, layer: int) -> LayerLoad:
    """Draw a layer's load, as a router may report it."""
    every = st.integers(0, geometry.num_experts - 1)
    experts = sorted(draw(st.sets(every, min_size=1, max_size=geometry.num_experts)))
    count = len(experts)
    tokens = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    weights = draw(st.sampled_from([(), tuple(n * 0.5 for n in tokens)]))
    return LayerLoad(layer, tuple(experts), tuple(tokens), weights)


@st.composite
def steps(draw: st.DrawFn, geometry: Geometry = GEOMETRY) -> list[list[LayerLoad]]:
    """Draw some steps through all layers."""
    count = draw(st.integers(1, 12))
    return [
        [draw(loads(geometry, layer)) for layer in range(geometry.num_layers)] for _ in range(count)
    ]


def shape_costs(
    geometry: Geometry = GEOMETRY,
    *,
    cpu: tuple[float, ...] = (1.0, 2.0),
    gpu: tuple[float, ...] = (0.25, 0.25),
    link: float = 2.0,
    dense: tuple[float, ...] = (0.5, 0.5),
    first: float = 0.0,
) -> ShapeCosts:
    """Draw small integer times for a shape."""
    return ShapeCosts(
        shape="tiny",
        num_moe_layers=geometry.num_layers,
        num_experts=geometry.num_experts,
        top_k=geometry.top_k,
        expert_bytes=1000,
        tokens=(1, 2),
        cpu_seconds=cpu,
        gpu_seconds=gpu,
        dense_seconds=dense,
        cpu_first_expert_seconds=first,
        link_seconds_per_expert=link,
    )
