"""The settings of systems that run a shape with random weights."""

from dataclasses import dataclass

from tandem.bench.peers.setting import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeSetting(Setting):
    """A shape, and the file that is written from it."""

    shape: str
    layers: int
    vocabulary: int
    expert_dtype: str
    dense_dtype: str
