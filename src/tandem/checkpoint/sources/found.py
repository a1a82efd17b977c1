"""What a source finds among the tensors of its files."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tandem.checkpoint.sources.codes import StoredWeight
from tandem.checkpoint.sources.files import TensorFiles
from tandem.core.errors import ModelError
from tandem.kernels.formats import WeightFormat
from tandem.kernels.formats.file_rows import FileFields


@dataclass(frozen=True, slots=True, kw_only=True)
class FileWeight:
    """What a `StoredWeight` of safetensors files says of itself; each format adds `read`."""

    name: str
    shape: tuple[int, ...]
    formats: Sequence[WeightFormat]
    why_not: str
    num_bytes: int
    files: TensorFiles = field(repr=False)
    is_ordered: bool = False
    near_format: None = None

    def in_file(self, fmt: WeightFormat, expert: int | None = None) -> list[FileFields] | None:
        """Return where rows lie that go to their places natively; None where they are not."""
        fields = self.fields(fmt, expert) if fmt in self.formats else None
        return None if fields is None or not fields.fit(fmt) else [fields]

    def fields(self, fmt: WeightFormat, expert: int | None) -> FileFields | None:
        """Return the codes of a format that holds them, for those that can say where they lie."""
        return None


@dataclass(slots=True)
class Found:
    """Quantised weights by the name that they would have unquantised, and the tensors they are."""

    weights: dict[str, StoredWeight] = field(default_factory=dict)
    parts: set[str] = field(default_factory=set)

    def add(self, weight: StoredWeight, parts: Iterable[str]) -> None:
        """Note a weight that consists of these tensors."""
        self.weights[weight.name] = weight
        self.parts.update(parts)


def checked_group_size(files: TensorFiles, prefix: str, said: int, rows: int, cols: int) -> int:
    """Return how many inputs share a scale, 0 and less being all; `ModelError` by the scales."""
    group_size = cols if said <= 0 else said
    shape = files.shape(f"{prefix}.scales")
    if cols % group_size or shape != (cols // group_size, rows):
        raise ModelError(
            f"{prefix}.scales has shape {shape}, expected {(cols // group_size, rows)} for groups "
            f"of {group_size} of {cols} inputs; use the config.json that belongs to these weights"
        )
    return group_size
