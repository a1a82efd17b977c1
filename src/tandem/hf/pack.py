"""`tandem.pack`: a packed checkpoint straight from another one, layer by layer.

A layer goes to its file when it is complete, and its memory is given back, so that packing needs
memory for the dense parts and a layer or two. Everything is written into a hidden directory beside
the target, which is renamed at the end; one that was interrupted goes on where it stopped, if the
source and the options are the same.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from safetensors import safe_open
from torch import Tensor

from tandem.checkpoint.hub import HubOptions, find_model_path
from tandem.checkpoint.packed import DENSE_FILE, experts_file, packed_name, require_new
from tandem.checkpoint.packed_files import FileSums, sha256_of, write_index, write_tensors
from tandem.checkpoint.sources.gguf_tokenizer import save_gguf_tokenizer
from tandem.core.config import from_mapping
from tandem.core.errors import CapacityError, ModelError, TandemError
from tandem.core.units import format_bytes
from tandem.experts.store.host_store import HostLayer
from tandem.foreign_types import PreTrainedModel
from tandem.hf.checkpoint import AnyCheckpoint, Checkpoint, open_model
from tandem.hf.config import OffloadConfig
from tandem.hf.load import load_checkpoint
from tandem.hf.runtime import require_runtime
from tandem.hf.save import dense_tensors, layer_tensors, write_configs

# (bytes of experts written, all of them); called after each layer.
OnProgress = Callable[[int, int], None]

_PROGRESS_FILE = "packing.json"
_LOCK_FILE = "lock"
# Beside the weights and config.json: tokenizer, chat template, generation config.
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_NOT_COPIED = ("config.json", "quantize_config.json", "quant_config.json")


@dataclass(slots=True)
class Packed:
    """What `pack` has done."""

    directory: Path
    num_bytes: int
    resumed_layers: int
    """Layers that an earlier, interrupted run had written."""


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

    `trust_remote_code` and `options` are those of `tandem.load`: `expert_dtype` and `dense_dtype`
    say what is packed. Raises `ModelError` and `CapacityError`; a full disk leaves nothing behind,
    an interruption leaves what the next call goes on with.
    """
    target = Path(directory)
    require_new(target)
    source = open_model(find_model_path(model, hub), may_run_code=trust_remote_code)
    if source.is_packed:
        raise ModelError(f"{source.path} is packed already; copy the directory")
    partial = target.with_name(f".{target.name}.partial")
    with _alone(partial):
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
    """Write everything; returns (bytes of all tensors, layers that were there)."""
    offload = from_mapping(OffloadConfig, options, where="tandem.pack")
    sink = FileSink(partial, _identity(source, options), on_progress)
    offload.sink = sink
    if not isinstance(source, Checkpoint):  # one that cannot be kept is found before hours of work
        save_gguf_tokenizer(source.path, partial)
    with contextlib.closing(sink):
        model = load_checkpoint(source, offload)
        num_bytes = sink.finish(model)
    require_runtime(model).executor.close()
    if isinstance(source, Checkpoint):
        _copy_small_files(source, partial)
    for name in (_PROGRESS_FILE, _LOCK_FILE):
        (partial / name).unlink(missing_ok=True)
    return num_bytes, sink.resumed


@dataclass(slots=True)
class FileSink:
    """Takes complete layers into files; knows those that an earlier run has written."""

    directory: Path
    identity: str
    on_progress: OnProgress
    sums: dict[str, FileSums] = field(default_factory=dict)
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    resumed: int = 0
    done_bytes: int = 0
    expected_bytes: int = 0
    pool: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, "tandem-pack"))
    writing: Future[None] | None = None

    def __post_init__(self) -> None:
        """Read what an earlier run noted; another source or other options start again."""
        try:
            noted = json.loads((self.directory / _PROGRESS_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            noted = {}
        if noted.get("identity") == self.identity and "sums" in noted:
            self.sums = {name: FileSums(*sums) for name, sums in noted["sums"].items()}

    def __deepcopy__(self, memo: dict[int, object]) -> "FileSink":
        return self  # Transformers copies the config that carries it

    def begin(self, expected_bytes: int) -> None:
        """Hear how many bytes of experts come; raises `CapacityError` if the disk has no room."""
        self.expected_bytes = expected_bytes
        there = sum((self.directory / n).stat().st_size for n in self.sums if self._has(n))
        free = shutil.disk_usage(self.directory).free
        if expected_bytes - there > free:
            raise CapacityError(
                f"packing writes {format_bytes(expected_bytes - there)} of experts to "
                f"{self.directory.parent}, which has {format_bytes(free)} free; make room, name "
                "another disk, or choose a smaller expert_dtype"
            )

    def resume(self, layer: HostLayer) -> None:
        """Map a layer's file if it is there and whole."""
        name = experts_file(layer.layer)
        if not self._has(name) or sha256_of(self.directory / name) != self.sums[name].sha256:
            self.sums.pop(name, None)
            return
        for tensor_name, tensor in self._mapped(name).items():
            layer.adopt(tensor_name.rpartition(".")[2].removeprefix(packed_name("")), tensor)
        self.resumed += 1
        self._note(name, layer)

    def take(self, layer: HostLayer) -> None:
        """Write a layer beside what comes next, when the one before is written."""
        self._wait()
        self.writing = self.pool.submit(self._write, layer)

    def close(self) -> None:
        """Wait for what is being written."""
        self.pool.shutdown()

    def _wait(self) -> None:
        if self.writing is not None:
            self.writing.result()

    def _write(self, layer: HostLayer) -> None:
        """Write a layer, and let it read from the file from now on."""
        name = experts_file(layer.layer)
        try:
            self.sums[name] = write_tensors(self.directory, name, layer_tensors(layer))
            self._write_progress()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ModelError(
                f"cannot write {name} beside {self.directory.parent}: {reason}; make room and pack "
                "again"
            ) from error
        prefix = f"{layer.arrivals.name}.{packed_name('')}"
        layer.move_to({n.removeprefix(prefix): t for n, t in self._mapped(name).items()})
        self._note(name, layer)

    def finish(self, model: PreTrainedModel) -> int:
        """Write the dense parts, the index and the config; return the bytes of all tensors."""
        self._wait()
        dense = dense_tensors(model, require_runtime(model))
        self.sums[DENSE_FILE] = write_tensors(self.directory, DENSE_FILE, dense)
        sizes = {name: tensor.nbytes for name, tensor in dense.items()}
        files = {DENSE_FILE: sizes, **dict(sorted(self.files.items()))}
        write_index(self.directory, files, self.sums)
        write_configs(model, self.directory)
        return sum(sum(sizes.values()) for sizes in files.values())

    def _has(self, name: str) -> bool:
        return name in self.sums and (self.directory / name).exists()

    def _mapped(self, name: str) -> dict[str, Tensor]:
        with safe_open(self.directory / name, framework="pt") as file:
            return {tensor: file.get_tensor(tensor) for tensor in file.keys()}  # noqa: SIM118

    def _note(self, name: str, layer: HostLayer) -> None:
        self.files[name] = {n: t.nbytes for n, t in layer_tensors(layer).items()}
        self.done_bytes += layer.num_bytes
        self.on_progress(self.done_bytes, self.expected_bytes)

    def _write_progress(self) -> None:
        text = json.dumps({"identity": self.identity, "sums": self.sums})
        partial = self.directory / f"{_PROGRESS_FILE}.part"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.directory / _PROGRESS_FILE)


def _identity(source: AnyCheckpoint, options: dict[str, object]) -> str:
    """Hash what the packed files depend on: the source's files and what is made of them."""
    stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in source.weight_files]
    config = source.config if isinstance(source, Checkpoint) else None
    chosen = {k: str(v) for k, v in options.items() if k in ("expert_dtype", "dense_dtype")}
    parts = (str(source.path.resolve()), config, stats, sorted(chosen.items()))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Make a directory and hold its lock; `ModelError` if another process packs into it."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory / _LOCK_FILE, os.O_CREAT | os.O_RDWR)
    try:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ModelError(
                    f"another process packs into {directory}; wait for it or name another directory"
                ) from None
        yield
    finally:
        os.close(lock)


def _copy_small_files(source: Checkpoint, target: Path) -> None:
    code = ("*.py",) if source.may_run_code else ()
    for pattern in (*_COPIED, *code):
        for file in source.directory.glob(pattern):
            is_weights = file.name.endswith(".index.json") or file.name in _NOT_COPIED
            if not is_weights and not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)
