"""The weights that a source has found among the tensors of its files."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tandem.checkpoint.sources.codes import Codes
from tandem.checkpoint.sources.files import TensorFiles
from tandem.core.errors import ModelError
from tandem.kernels.formats import WeightFormat
from tandem.kernels.formats.file_rows import FileFields


@dataclass(frozen=True, slots=True, kw_only=True)
class FileWeight:
    """An unread weight in safetensors files; the subclass of each format implements `read`."""

    name: str
    """The parameter's name in an unquantised checkpoint."""
    shape: tuple[int, ...]
    """(rows, cols), or (num_experts, rows, cols) for the experts of a layer in one tensor."""
    formats: Sequence[WeightFormat]
    """Packed formats that hold the weight exactly, the smallest first; may be empty."""
    what: str = ""
    """A description of the codes, for the error message if no format holds them."""
    parts: Sequence[str]
    """The names of the tensors that the weight consists of."""
    files: TensorFiles = field(repr=False)
    is_ordered: bool = False
    """Whether its columns may be in another order than the layer's inputs."""
    near_format: None = None
    """The format to round to if parts need different formats; always None in safetensors."""

    @property
    def why_not(self) -> str:
        """A description of the codes if no format holds the weight; empty if one does."""
        return "" if self.formats else self.what

    @property
    def num_bytes(self) -> int:
        """The bytes that the weight takes in the checkpoint's files."""
        return self.files.num_bytes(*self.parts)

    def read_part(self, part: str) -> Tensor:
        """Read one tensor of the weight, by the last part of its name."""
        return self.files.read(f"{self.name.removesuffix('.weight')}.{part}")

    def read(self, expert: int | None = None) -> Codes:
        """Read the matrix, or the matrix of `expert`; raises `ModelError` if it is damaged."""
        raise NotImplementedError

    def in_file(self, fmt: WeightFormat, expert: int | None = None) -> list[FileFields] | None:
        """Return views of the file from which native code copies the rows, in a list of one.

        Returns None if native code cannot copy them into `fmt`; `read` must then be used.
        """
        fields = self.fields(fmt, expert) if fmt in self.formats else None
        return None if fields is None or not fields.fit(fmt) else [fields]

    def fields(self, fmt: WeightFormat, expert: int | None) -> FileFields | None:
        """Return views of the codes in the file if `fmt` holds them unchanged; None otherwise."""
        return None


@dataclass(slots=True)
class Found:
    """Collects quantised weights and the names of their tensors.

    Keys of `weights` are the names of the parameters in an unquantised checkpoint.
    """

    weights: dict[str, FileWeight] = field(default_factory=dict)
    parts: set[str] = field(default_factory=set)

    def add(self, weight: FileWeight) -> None:
        """Record a weight and the tensors that it consists of."""
        self.weights[weight.name] = weight
        self.parts.update(weight.parts)


def checked_group_size(
    files: TensorFiles, prefix: str, configured: int, rows: int, cols: int
) -> int:
    """Return how many inputs share a scale: `configured`, or all if that is 0 or less.

    Raises `ModelError` if the shape of the scales contradicts the group size.
    """
    group_size = cols if configured <= 0 else configured
    shape = files.shape(f"{prefix}.scales")
    if cols % group_size or shape != (cols // group_size, rows):
        raise ModelError(
            f"{prefix}.scales has shape {shape}, expected {(cols // group_size, rows)} for groups "
            f"of {group_size} of {cols} inputs; use the config.json that belongs to these weights"
        )
    return group_size
