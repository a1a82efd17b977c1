"""Leaves tables of rows on the disk: large embeddings of which a token reads only a few rows.

The embeddings belong to n-grams, or to single layers. The tables stay on the disk if memory cannot
hold the whole model. A call reads the rows that its tokens need from the checkpoint's files, all at
once (`csrc/disk`).
"""

import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tandem.checkpoint.sources.safetensors_header import TensorEntry, read_header
from tandem.core.errors import ModelError, TandemWarning, first_line
from tandem.core.units import format_bytes
from tandem.experts.store.stand_in import StandIn
from tandem.foreign_types import PreTrainedModel
from tandem.hf.compat import ignore_in_files, target_names
from tandem.hf.dense import is_tower, tied_weights
from tandem.hf.packed_layers import embedding_scale, is_packable_embedding
from tandem.kernels import _native
from tandem.kernels.opaque_calls import DISK_ROWS, opaque

# A smaller table is not worth a read per token.
_LEAST_BYTES = 64 << 20
# A row takes a page or two. With this many reads at once, a disk reaches its rate for small reads.
_READERS = 16
# A request fails after this time without a row, as with experts.
_PATIENCE_SECONDS = 60.0
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TablePlace:
    """The place of a table's rows in files: tensors that contain the rows one after another."""

    parts: tuple[TensorEntry, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        return _DTYPES[self.parts[0].dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def native(self) -> tuple[list[tuple[str, int, int]], int]:
        """The table for `RowTables`: its parts (file, first byte, rows) and the bytes of a row."""
        parts = [(str(part.file), part.first, part.shape[0]) for part in self.parts]
        return parts, self.parts[0].shape[1] * self.dtype.itemsize

    def tensors(self) -> list[Tensor]:
        """Return the parts as read-only mapped tensors; `ModelError` if a file cannot be read."""
        try:
            maps = [
                np.memmap(part.file, np.uint8, "r", offset=part.first, shape=(part.num_bytes,))
                for part in self.parts
            ]
        except (OSError, ValueError) as error:  # a ValueError if the file is too short
            raise ModelError(
                f"{self.parts[0].file} has a table of rows that cannot be read "
                f"({first_line(error)}); put the file back, and load the model again"
            ) from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the tensors are read-only
            tensors = list(map(torch.from_numpy, maps))
        pairs = zip(tensors, self.parts, strict=True)
        return [tensor.view(self.dtype).view(part.shape) for tensor, part in pairs]


class DiskEmbedding(nn.Module):
    """Embeddings whose rows stay on the disk; a call reads the rows of its tokens."""

    def __init__(
        self, replaced: nn.Embedding, place: TablePlace, tables: _native.RowTables, number: int
    ) -> None:
        """Take over the settings of `replaced`, whose rows are at `place`.

        In `tables`, which reads the rows, they are the table `number`.
        """
        super().__init__()
        self.num_embeddings, self.embedding_dim = replaced.num_embeddings, replaced.embedding_dim
        self.padding_idx = replaced.padding_idx
        self.dtype, self.place, self.tables = replaced.weight.dtype, place, tables
        self.scale = embedding_scale(replaced)
        self._number = number

    @property
    def weight(self) -> Tensor:
        """A tensor with the weight's shape and dtype; its values cannot be read."""
        return StandIn((self.num_embeddings, self.embedding_dim), self.dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the tokens' embeddings: (...) int64 -> (..., embedding_dim)."""
        width, dtype = self.embedding_dim, self.place.dtype
        rows = opaque(DISK_ROWS, _read, self.tables, self._number, width, dtype, input_ids)
        rows = rows.to(self.dtype)
        return rows if self.scale is None else rows * self.scale

    def extra_repr(self) -> str:
        """Return the shape and where the rows are."""
        return f"{self.num_embeddings}, {self.embedding_dim}, on the disk"


def _read(
    tables: _native.RowTables, number: int, width: int, dtype: torch.dtype, ids: Tensor
) -> Tensor:
    """Return the rows of `ids`, on the device of `ids`; waits for ids that a GPU computes."""
    numbers = ids.to("cpu", torch.int64).contiguous()
    out = room_for_rows(tables, number, width, dtype, numbers)
    tables.read(number, numbers, out)
    return out.to(ids.device)


def room_for_rows(
    tables: _native.RowTables, number: int, width: int, dtype: torch.dtype, ids: Tensor
) -> Tensor:
    """Return an empty tensor for the result of a `DISK_ROWS` call, on the device of `ids`."""
    return torch.empty((*ids.shape, width), dtype=dtype, device=ids.device)


def row_tables(model: PreTrainedModel) -> dict[str, nn.Embedding]:
    """Return, by path, a model's tables of rows: large embeddings, not the token embeddings.

    Embeddings of towers, and embeddings that share their weight, are left out.
    """
    tied = tied_weights(model)
    shared = {*tied, *tied.values()}
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and module.weight.nbytes >= _LEAST_BYTES
        and is_packable_embedding(module)
        and module is not model.get_input_embeddings()
        and f"{path}.weight" not in shared
        and not is_tower(path)
    }


def tables_on_disk(model: nn.Module) -> list[DiskEmbedding]:
    """Return a model's embeddings whose rows stay on the disk."""
    return [module for module in model.modules() if isinstance(module, DiskEmbedding)]


def stored_tables(model: PreTrainedModel) -> dict[str, list[Tensor]]:
    """Return a model's tables of rows by the names of their weights, each as a list of parts."""
    on_disk = {p: m.place for p, m in model.named_modules() if isinstance(m, DiskEmbedding)}
    found = {f"{path}.weight": [table.weight.detach()] for path, table in row_tables(model).items()}
    return found | {f"{path}.weight": place.tensors() for path, place in on_disk.items()}


def leave_on_disk(model: PreTrainedModel, entries: Mapping[str, TensorEntry]) -> Collection[Path]:
    """Replace a model's tables by modules that read rows from files, before weights are loaded.

    `entries` has the files' tensors by name. A table is not replaced if its tensors in these files
    are incomplete or differ in dtype. Returns the files that hold only replaced tables, which
    loading need not open.
    """
    places = _places(model, row_tables(model), entries)
    if not places:
        return ()
    try:
        native = _native.RowTables(
            [place.native for place in places.values()], _READERS, _PATIENCE_SECONDS
        )
    except RuntimeError as error:
        raise ModelError(str(error)) from None
    for number, (path, place) in enumerate(places.items()):
        above, _, name = path.rpartition(".")
        table = DiskEmbedding(model.get_submodule(path), place, native, number)
        setattr(model.get_submodule(above), name, table)
    ignore_in_files(model, [f"{path}.weight" for path in places])
    left = {part for place in places.values() for part in place.parts}
    others = {entry.file for entry in entries.values() if entry not in left}
    return {part.file for part in left} - others


def warn_of_tables(model: PreTrainedModel, free_bytes: int) -> None:
    """If tables stay on the disk, warn, and say that `free_bytes` of memory are free."""
    tables = tables_on_disk(model)
    if not tables:
        return
    where = tables[0].place.parts[0].file.parent
    num_bytes = sum(table.place.num_bytes for table in tables)
    _warn(
        f"{where} has {format_bytes(num_bytes)} of tables of which a token reads a few rows, and "
        f"{format_bytes(free_bytes)} of memory are free: rows are read from the disk"
    )
    if not tables[0].tables.is_direct():
        _warn(
            f"the file system of {where} takes no unbuffered reads: rows pass through the system's "
            "cache; put the model on a local disk"
        )


def entries_of(files: Iterable[str]) -> dict[str, TensorEntry]:
    """Return the tensors of all safetensors files among `files`, by name."""
    found: dict[str, TensorEntry] = {}
    for file in files:
        if file.endswith(".safetensors"):
            found |= read_header(Path(file))
    return found


def _places(
    model: PreTrainedModel, tables: Mapping[str, nn.Embedding], entries: Mapping[str, TensorEntry]
) -> dict[str, TablePlace]:
    """Return the places of `tables` by path, without tables that `entries` does not hold whole."""
    words = {path.rpartition(".")[2] for path in tables}
    names = [name for name in entries if not words.isdisjoint(name.split("."))]
    parts: dict[str, list[str]] = defaultdict(list)
    for name, target in target_names(model, names).items():
        parts[target].append(name)
    found = {}
    for path, table in tables.items():
        own = tuple(entries[name] for name in sorted(parts[f"{path}.weight"], key=_by_numbers))
        if _are_rows(own, table):
            found[path] = TablePlace(own)
    return found


def _are_rows(parts: Collection[TensorEntry], table: nn.Embedding) -> bool:
    width, dtypes = table.embedding_dim, {part.dtype for part in parts}
    are_rows = all(len(p.shape) == 2 and p.shape[0] > 0 and p.shape[1] == width for p in parts)
    is_whole = are_rows and sum(part.shape[0] for part in parts) == table.num_embeddings
    return is_whole and len(dtypes) == 1 and dtypes <= _DTYPES.keys()


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names as Transformers joins parts: numbers in them by their value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _warn(sentence: str) -> None:
    warnings.warn(sentence, TandemWarning, stacklevel=6)
