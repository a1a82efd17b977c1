"""`tandem.save`: write a loaded model as a packed checkpoint that loads without conversion."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from tandem.checkpoint.file_writer import FileSums
from tandem.checkpoint.mapped_files import places_of
from tandem.checkpoint.packed import INDEX_FILE, experts_file, require_new
from tandem.checkpoint.packed_files import require_as_written
from tandem.core.errors import ModelError, capacity_errors
from tandem.experts.store.host_store import HostLayer
from tandem.foreign_types import PreTrainedModel, Tokenizer
from tandem.hf.packed_writer import PackedWriter
from tandem.hf.row_tables import DiskEmbedding
from tandem.hf.runtime import Runtime, runtime_of


@capacity_errors()
def save(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Path:
    """Write a model loaded by Tandem, and its tokenizer, to a new directory.

    The directory appears when everything is written, or not at all. `on_progress` gets the bytes of
    tensors written so far, after each file; an exception from it cancels the writing. Raises
    `ModelError`, also if packed files of the model are damaged.
    """
    target = Path(directory)
    runtime = runtime_of(model)
    if hasattr(model, "peft_config"):
        raise ModelError(
            "tandem.save got a model with adapters, which packed files do not hold; save them with "
            "save_pretrained, or write model.merge_and_unload()"
        )
    if runtime is None:
        raise ModelError(
            f"tandem.save got a {type(model).__name__} that Tandem did not load; "
            "use its own save_pretrained"
        )
    runtime.require_open()
    require_new(target)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write(model, runtime, partial, on_progress or (lambda _: None))
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        partial.replace(target)
    except OSError as error:
        raise ModelError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _write(
    model: PreTrainedModel, runtime: Runtime, directory: Path, on_progress: Callable[[int], None]
) -> None:
    """Write a model's files; tell `on_progress` the bytes so far, after each file of tensors."""
    files = PackedWriter(directory)
    files.write_dense(model)
    _require_tables_as_written(model, files.sums)
    on_progress(files.num_bytes)
    for layer in runtime.store:
        source = _file_of(layer)
        files.write_experts(layer)
        if source is not None:
            require_as_written(source, files.sums[experts_file(layer.layer)])
        on_progress(files.num_bytes)
    files.finish(model)


def _file_of(layer: HostLayer) -> Path | None:
    """Return the packed file that holds a layer's experts; None: no packed file holds them.

    Raises `ModelError` for a truncated file: reading beyond a mapped file's end kills the process.
    """
    experts = next(iter(layer.stored().values()))
    found = places_of([experts])
    if found is None or not _is_packed(file := found[0][0]):
        return None
    size, end = file.stat().st_size, found[0][1] + experts.nbytes
    if size < end:
        raise ModelError(
            f"{file} has {size} bytes, expected {end} or more; it was cut or replaced while it was "
            "in use: copy it again, or pack the model again"
        )
    return file


def _require_tables_as_written(model: PreTrainedModel, written: Mapping[str, FileSums]) -> None:
    """Raise `ModelError` if a table copied from packed files does not match their checksums."""
    crc32 = {name: crc for sums in written.values() for name, crc in sums.crc32.items()}
    for path, module in model.named_modules():
        if isinstance(module, DiskEmbedding) and _is_packed(file := module.place.parts[0].file):
            name = f"{path}.weight"
            require_as_written(file, FileSums("", {name: crc32[name]}, {}))


def _is_packed(file: Path) -> bool:
    return file.with_name(INDEX_FILE).is_file()
