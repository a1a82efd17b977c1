"""What systems are asked of a shape, whose weights they make up."""

from dataclasses import dataclass

from tandem.bench.peers.setting import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeSetting(Setting):
    """A shape beside the file that is written of it."""

    shape: str
    layers: int
    vocabulary: int
    expert_dtype: str
    dense_dtype: str
