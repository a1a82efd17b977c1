"""`tandem.pack`: writes a packed checkpoint directly from another checkpoint, layer by layer.

Each complete layer is written to its file and freed, so that packing needs memory only for the
dense parts and a layer or two. All files are written into a hidden directory beside the target,
which is renamed at the end. If a run is interrupted, the next run continues where it stopped,
provided that the source and the options are the same.
"""

import contextlib
import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from tandem.checkpoint.hub import HubOptions, find_model_path
from tandem.checkpoint.packed import alone, require_new
from tandem.core.config import from_mapping
from tandem.core.errors import ModelError, TandemError, capacity_errors
from tandem.hf.checkpoint import AnyCheckpoint, Checkpoint, open_model
from tandem.hf.config import PACKED_FORMAT_VERSION, OffloadConfig
from tandem.hf.importance import with_importance_file
from tandem.hf.load import load_checkpoint
from tandem.hf.packed_writer import PROGRESS_FILE, FileSink, OnProgress
from tandem.hf.runtime import require_runtime
from tandem.text.gguf_tokenizer import save_gguf_tokenizer

_LOCK_FILE = "lock"
# Files beside the weights and config.json: tokenizer, chat template, generation config.
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_SAYS_WHAT_IS_PACKED = ("expert_dtype", "dense_dtype", "expert_formats", "dense_formats")
_NOT_COPIED = ("config.json", "quantize_config.json", "quant_config.json")


@dataclass(slots=True)
class Packed:
    """The packed checkpoint that `pack` has written."""

    directory: Path
    num_bytes: int
    resumed_layers: int
    """The number of layers that an earlier, interrupted run had written."""


@capacity_errors()
def pack(
    model: str | Path,
    directory: str | Path,
    *,
    hub: HubOptions | None = None,
    trust_remote_code: bool = False,
    on_progress: OnProgress | None = None,
    **options: object,
) -> Packed:
    """Write a checkpoint (directory, GGUF file or hub id) as a packed one to a new directory.

    `trust_remote_code` and `options` are those of `tandem.load`. `expert_dtype` and `dense_dtype`,
    or a recipe's `expert_formats` and `dense_formats`, set the formats; `importance` weights the
    rounding. Raises `ModelError` and `CapacityError`. After an error, such as a full disk, no files
    are left; an interrupted run leaves its files, with which the next call continues.
    """
    target = Path(directory)
    require_new(target)
    source = open_model(find_model_path(model, hub), may_run_code=trust_remote_code)
    if source.is_packed:
        raise ModelError(f"{source.path} is packed already; copy the directory")
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    with alone(partial / _LOCK_FILE) as is_alone:
        if not is_alone:
            raise ModelError(
                f"another process packs into {partial}; wait for it or name another directory"
            )
        try:
            packed = _pack(source, partial, options, on_progress or (lambda *_: None))
            partial.replace(target)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise ModelError(f"cannot write {target}: {error.strerror or error}") from error
        except TandemError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return Packed(target, *packed)


def _pack(
    source: AnyCheckpoint, partial: Path, options: dict[str, object], on_progress: OnProgress
) -> tuple[int, int]:
    """Write all files; return (bytes of all tensors, number of layers from an earlier run)."""
    offload = from_mapping(OffloadConfig, options, where="tandem.pack")
    offload = with_importance_file(offload, source)
    sink = FileSink(partial, _identity(source, options, offload.importance), on_progress)
    # First, so that a tokenizer that cannot be saved fails before hours of work.
    if not isinstance(source, Checkpoint):
        save_gguf_tokenizer(source.path, partial)
    with contextlib.closing(sink):
        model = load_checkpoint(source, offload, sink=sink)
        num_bytes = sink.finish(model)
    require_runtime(model).executor.close()
    if isinstance(source, Checkpoint):
        _copy_small_files(source, partial)
    for name in (PROGRESS_FILE, _LOCK_FILE):
        (partial / name).unlink(missing_ok=True)
    return num_bytes, sink.num_resumed


def _identity(source: AnyCheckpoint, options: dict[str, object], importance: str | None) -> str:
    """Return a hash of what packed files depend on: the source's files and the options."""
    stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in source.weight_files]
    config = source.config if isinstance(source, Checkpoint) else None
    chosen = {k: str(v) for k, v in options.items() if k in _SAYS_WHAT_IS_PACKED}
    if importance is not None and (file := Path(importance)).is_file():
        chosen["importance"] = f"{file.resolve()} of {file.stat().st_mtime_ns}"
    path, version = str(source.path.resolve()), PACKED_FORMAT_VERSION
    parts = (path, config, stats, sorted(chosen.items()), version)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _copy_small_files(source: Checkpoint, target: Path) -> None:
    code = ("*.py",) if source.may_run_code else ()
    for pattern in (*_COPIED, *code):
        for file in source.directory.glob(pattern):
            is_weights = file.name.endswith(".index.json") or file.name in _NOT_COPIED
            if not is_weights and not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)
