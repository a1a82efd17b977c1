"""Names of things that several floors talk about."""

from typing import NamedTuple


class ExpertId(NamedTuple):
    """One routed expert: `layer` counts MoE layers from 0, `expert` counts within the layer."""

    layer: int
    expert: int
