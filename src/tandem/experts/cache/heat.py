"""Routing heat: how often each expert was used, kept across runs to fill the cache at the start."""

from pathlib import Path

import numpy as np

from tandem.experts.tracing.events import LayerExecuted
from tandem.policy.plan import Geometry

# Weight of a run's counts when the next one starts; older runs fade.
KEEP = 0.5


class Heat:
    """Listens to an executor and counts each expert's tokens; `save` writes the heat to a file."""

    def __init__(self, geometry: Geometry, path: Path) -> None:
        """Begin with the heat of earlier runs in the file `path`; a damaged file is ignored."""
        self._num_experts = geometry.num_experts
        self._path = path
        self._size = geometry.num_layers * geometry.num_experts
        self.before = self._read()
        self._counts = [0] * self._size

    def __call__(self, event: LayerExecuted) -> None:
        """Count the tokens of a layer's active experts."""
        load = event.load
        if load is None:
            return
        counts, first = self._counts, load.layer * self._num_experts
        for expert, tokens in zip(load.experts, load.tokens, strict=True):
            counts[first + expert] += tokens

    def values(self) -> list[float]:
        """Return each expert's heat: `KEEP` times its earlier heat, plus its share of this run.

        The share is of this run's routed tokens. Before the run's first token, the earlier heat is
        returned unchanged.
        """
        now = np.array(self._counts, dtype=np.float64)
        total = now.sum()
        if not total:
            return self.before
        older = np.array(self.before)
        return [float(value) for value in KEEP * older + now / total]

    def save(self) -> None:
        """Save the heat for the next run; no-op without counted tokens or if writing fails."""
        if not any(self._counts):
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_suffix(".partial")
            with partial.open("wb") as file:
                np.save(file, np.array(self.values()))
            partial.replace(self._path)
        except OSError:
            return

    def _read(self) -> list[float]:
        try:
            found = np.load(self._path, allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return [0.0] * self._size
        if found.shape != (self._size,) or not np.isfinite(found).all():
            return [0.0] * self._size
        return [float(value) for value in found]
