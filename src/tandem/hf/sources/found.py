"""What a source finds among the tensors of its files."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem.hf.sources.codes import StoredWeight


@dataclass(slots=True)
class Found:
    """Quantised weights by the name that they would have unquantised, and the tensors they are."""

    weights: dict[str, StoredWeight] = field(default_factory=dict)
    parts: set[str] = field(default_factory=set)

    def add(self, weight: StoredWeight, parts: Iterable[str]) -> None:
        """Note a weight that consists of these tensors."""
        self.weights[weight.name] = weight
        self.parts.update(parts)
