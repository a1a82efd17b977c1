"""`tandem.save`: write a loaded model as a packed checkpoint that loads without conversion."""

import shutil
from collections.abc import Callable
from pathlib import Path

from tandem.checkpoint.packed import require_new
from tandem.core.errors import ModelError
from tandem.foreign_types import PreTrainedModel, Tokenizer
from tandem.hf.packed_writer import PackedWriter
from tandem.hf.runtime import Runtime, runtime_of


def save(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Path:
    """Write a model loaded by Tandem, and its tokenizer, to a new directory.

    The directory appears at once when everything is written, or not at all. `on_progress` gets the
    bytes of tensors written so far, after each file; what it raises ends the writing.
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
    """Write the dense parts, one file per MoE layer, and what makes a checkpoint of them."""
    files = PackedWriter(directory)
    files.write_dense(model)
    on_progress(files.num_bytes)
    for layer in runtime.store:
        files.write_experts(layer)
        on_progress(files.num_bytes)
    files.finish(model)
