"""Writes a packed checkpoint's files, from a loaded model or layer by layer while it loads."""

import copy
import json
import shutil
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from tandem.checkpoint.file_writer import FileSums, Parts, write_tensors
from tandem.checkpoint.packed import DENSE_FILE, experts_file, packed_name, rows_file
from tandem.checkpoint.packed_files import experts_tensor, sha256_of, write_index
from tandem.checkpoint.sources.safetensors_header import read_header
from tandem.core.errors import CapacityError, ModelError
from tandem.core.units import format_bytes
from tandem.experts.store.host_store import HostLayer
from tandem.experts.store.packed_layer import PackedLayer
from tandem.foreign_types import PreTrainedConfig, PreTrainedModel
from tandem.hf.config import PACKED_FORMAT_VERSION, OffloadConfig, plain_name
from tandem.hf.dense_files import dense_formats_of, packed_formats, stored_tensors
from tandem.hf.row_tables import stored_tables
from tandem.hf.runtime import require_runtime

PROGRESS_FILE = "packing.json"
# (bytes of experts written, total); called after each layer.
OnProgress = Callable[[int, int], None]


class PackedWriter:
    """Writes a packed checkpoint's tensor files; `finish` adds the index and the configs."""

    def __init__(self, directory: Path) -> None:
        """Prepare to write into `directory`, which must exist."""
        self.directory = directory
        self.sums: dict[str, FileSums] = {}
        self._sizes: dict[str, dict[str, int]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors written so far."""
        return sum(sum(sizes.values()) for sizes in self._sizes.values())

    def write_experts(self, layer: HostLayer) -> None:
        """Write the file with the experts of a layer."""
        name, tensors = experts_file(layer.layer), _layer_tensors(layer)
        experts = experts_tensor(layer.arrivals.name)
        self._write(name, tensors, experts if experts in tensors else None)

    def write_dense(self, model: PreTrainedModel) -> None:
        """Write the file of dense parts, and one file for each table of rows."""
        tables = stored_tables(model)
        self._write(DENSE_FILE, _dense_tensors(model, tables))
        for number, (name, parts) in enumerate(tables.items()):
            self._write(rows_file(number), {name: parts})

    def _write(self, name: str, tensors: Mapping[str, Parts], experts: str | None = None) -> None:
        self.sums[name] = write_tensors(self.directory, name, tensors, experts=experts)
        self.note(name)

    def note(self, name: str) -> None:
        """Record, for the index, the tensors of a file that has been written."""
        entries = read_header(self.directory / name)
        self._sizes[name] = {tensor: entry.num_bytes for tensor, entry in entries.items()}

    def finish(self, model: PreTrainedModel) -> None:
        """Write the index and config.json, and the model's generation config."""
        write_index(self.directory, dict(sorted(self._sizes.items())), self.sums)
        _packed_config(model).save_pretrained(self.directory)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(self.directory)


class LayerSink(Protocol):
    """Receives each layer once it is completely read, so that memory need not hold all layers."""

    def begin(self, expected_bytes: int, table_bytes: int) -> None:
        """Receive the total bytes of experts and tables of rows; must precede the first layer."""

    def resume(self, layer: HostLayer) -> None:
        """Complete the layer from the file that an earlier run wrote, if there is one.

        Called before the layer's tensors are read from the checkpoint.
        """

    def take(self, layer: HostLayer) -> None:
        """Take a complete layer; its memory may then be freed."""


class FileSink:
    """Writes complete layers to files, and reuses the files that an earlier run has written."""

    def __init__(self, directory: Path, identity: str, on_progress: OnProgress) -> None:
        """Read the progress of an earlier run in `directory`, if it has the same `identity`.

        `identity` stands for the source and the options.
        """
        self._files, self._identity, self._on_progress = (
            PackedWriter(directory), identity, on_progress,
        )  # fmt: skip
        self.num_resumed = 0
        self._done_bytes = self._expected_bytes = 0
        self._pool = ThreadPoolExecutor(1, "tandem-pack")
        self._writing: Future[None] | None = None
        try:
            noted = json.loads((directory / PROGRESS_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            noted = {}
        if noted.get("identity") == identity and "sums" in noted:
            self._files.sums = {name: FileSums(*sums) for name, sums in noted["sums"].items()}

    def begin(self, expected_bytes: int, table_bytes: int) -> None:
        """Receive the total bytes of experts and tables of rows; must precede the first layer.

        Raises `CapacityError` if the disk has no room.
        """
        self._expected_bytes = expected_bytes
        directory = self._files.directory
        there = sum((directory / n).stat().st_size for n in self._files.sums if self._has(n))
        free = shutil.disk_usage(directory).free
        needed = expected_bytes - there + table_bytes
        if needed > free:
            what = "experts and tables of rows" if table_bytes else "experts"
            raise CapacityError(
                f"packing writes {format_bytes(needed)} of {what} to "
                f"{directory.parent}, which has {format_bytes(free)} free; make room, name "
                "another disk, or choose a smaller expert_dtype"
            )

    def resume(self, layer: HostLayer) -> None:
        """Complete a layer by mapping its file, if an earlier run wrote it and it is undamaged."""
        name, files = experts_file(layer.layer), self._files
        if not self._has(name) or sha256_of(files.directory / name) != files.sums[name].sha256:
            files.sums.pop(name, None)
            return
        for tensor_name, tensor in self._mapped(layer).items():
            layer.adopt(tensor_name, tensor)
        self.num_resumed += 1
        files.note(name)
        self._tell(layer)

    def take(self, layer: HostLayer) -> None:
        """Write a layer in the background, once the previous layer is written."""
        self._wait()
        self._writing = self._pool.submit(self._write, layer)

    def close(self) -> None:
        """Wait until the layer in progress is written; end the writing thread."""
        self._pool.shutdown()

    def finish(self, model: PreTrainedModel) -> int:
        """Wait for the last layer, write all other files, and return the bytes of all tensors.

        The other files hold the dense parts, the tables of rows, the index and the configs.
        """
        self._wait()
        self._files.write_dense(model)
        self._files.finish(model)
        return self._files.num_bytes

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def _write(self, layer: HostLayer) -> None:
        """Write a layer to its file; replace the layer's tensors by views of the mapped file."""
        try:
            self._files.write_experts(layer)
            self._write_progress()
        except OSError as error:
            reason = error.strerror or str(error)
            name, directory = experts_file(layer.layer), self._files.directory
            raise ModelError(
                f"cannot write {name} beside {directory.parent}: {reason}; make room and pack again"
            ) from error
        layer.move_to(self._mapped(layer))
        self._tell(layer)

    def _has(self, name: str) -> bool:
        return name in self._files.sums and (self._files.directory / name).exists()

    def _mapped(self, layer: HostLayer) -> dict[str, Tensor]:
        """Return the tensors of a layer's file, by their names in the layer."""
        prefix = f"{layer.arrivals.name}.{packed_name('')}"
        with safe_open(self._files.directory / experts_file(layer.layer), framework="pt") as file:
            return {name.removeprefix(prefix): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def _tell(self, layer: HostLayer) -> None:
        self._done_bytes += layer.num_bytes
        self._on_progress(self._done_bytes, self._expected_bytes)

    def _write_progress(self) -> None:
        text = json.dumps({"identity": self._identity, "sums": self._files.sums})
        partial = self._files.directory / f"{PROGRESS_FILE}.part"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self._files.directory / PROGRESS_FILE)


def _layer_tensors(layer: HostLayer) -> dict[str, Tensor]:
    """Return a layer's tensors for a packed checkpoint, by the names in its file."""
    name = layer.arrivals.name
    return {f"{name}.{packed_name(part)}": tensor for part, tensor in layer.stored().items()}


def _dense_tensors(model: PreTrainedModel, tables: Collection[str]) -> dict[str, Parts]:
    """Return the state dict without experts and tables of rows, and with packed layers as stored.

    Of tied tensors only the first is included, because loading ties them again.
    """
    tensors: dict[str, Parts] = {}
    seen: set[tuple[int, torch.Size]] = set()
    packed = packed_formats(model)
    experts = {
        f"{name}.{x}"
        for name, layer in require_runtime(model).layers.items()
        for x in layer.arrivals.shapes
    }
    for name, tensor in model.state_dict().items():
        if name.rpartition(".")[0] in packed or name in experts or name in tables:
            continue
        place = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        tensors[name] = tensor.contiguous()
    return tensors | stored_tensors(model)


def _packed_config(model: PreTrainedModel) -> PreTrainedConfig:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    formats = [stored_name(layer) for layer in require_runtime(model).store]
    dense_dtype, dense_formats = dense_formats_of(model)
    config.quantization_config = OffloadConfig(
        expert_dtype=formats[0] if len(set(formats)) == 1 else "auto",
        dense_dtype=dense_dtype,
        dense_formats=dense_formats or None,
        packed_format=PACKED_FORMAT_VERSION,
        expert_formats=formats if len(set(formats)) > 1 else None,
    )
    if hasattr(config, "transformers_weights"):
        del config.transformers_weights  # the quantizer has set it during loading
    return config


def stored_name(layer: HostLayer) -> str:
    """Return the name of a layer's dtype or format, as in `expert_dtype`."""
    if isinstance(layer, PackedLayer):
        return layer.layout.format_name
    return {plain_name(tensor.dtype) for tensor in layer.stored().values()}.pop()
