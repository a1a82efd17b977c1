"""Notes on disk that a model's decode steps have passed their trial, to shorten later trials.

A note is an empty file. Its name is a hash of everything that the outcome depends on: the model's
config and modules, the formats of its weights, the instruction set, the versions of torch and
Transformers, and every file of Tandem. Without a note the trial runs again.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from tandem.experts.store.packed_layer import PackedLayer
from tandem.foreign_types import PreTrainedModel
from tandem.hf.identity import model_identity
from tandem.hf.packed_layers import PackedModule
from tandem.hf.runtime import runtime_of
from tandem.kernels.dense import CpuThreads

_PACKAGE = Path(__file__).parent.parent


class TrialNote:
    """The note on disk that a model, in its present form, has passed its trial."""

    def __init__(
        self, directory: Path, model: PreTrainedModel, threads: CpuThreads, kv_dtype: str
    ) -> None:
        """Compute the note's name; this reads no weights except a part of the embedding."""
        digest = hashlib.sha256()
        facts = (threads.isa, kv_dtype, str(model.dtype), torch.__version__)
        for fact in (*facts, transformers.__version__, *_parts(model), *_own_files()):
            digest.update(fact.encode() + b"\n")
        name = f"{model.config.model_type}-{model_identity(model)}-{digest.hexdigest()[:16]}"
        self._file = directory / name

    @property
    def is_there(self) -> bool:
        """Whether the note exists: the model's decode steps have passed their trial."""
        return self._file.is_file()

    def write(self) -> None:
        """Write the note; errors are ignored, as the trial then just runs again."""
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch()


def _parts(model: PreTrainedModel) -> Iterator[str]:
    """Yield the names, classes and formats of a model's modules and experts."""
    for name, module in model.named_modules():
        kind = type(module)
        packed = module.packed.matrix.format if isinstance(module, PackedModule) else ""
        yield f"{name} {kind.__module__}.{kind.__qualname__} {packed}"
    runtime = runtime_of(model)
    for layer in () if runtime is None else runtime.store:
        yield str(layer.layout.format if isinstance(layer, PackedLayer) else type(layer))


def _own_files() -> Iterator[str]:
    """Yield Tandem's files with sizes and modification times: any change repeats the trial."""
    for file in sorted(_PACKAGE.rglob("*.*")):
        if file.suffix in (".py", ".so"):
            status = file.stat()
            yield f"{file.relative_to(_PACKAGE)} {status.st_size} {status.st_mtime_ns}"
