"""Reads a packed checkpoint into memory: first the dense parts, which are packed, then experts.

Packing linear layers takes memory, and afterwards their file is not needed. If memory is short and
experts were read first, the system would drop their pages again. For a user's own `from_pretrained`
no further layers are packed, and the pages are mapped as they are.
"""

import warnings
from collections.abc import Callable
from pathlib import Path

from torch import Tensor
from tqdm import tqdm
from transformers.utils import logging

from tandem.checkpoint.mapped_files import copy_out_of_files, let_go, map_ahead, read_ahead
from tandem.checkpoint.packed import is_experts_file
from tandem.checkpoint.packed_files import require_checksums
from tandem.core.errors import TandemWarning
from tandem.core.units import format_bytes
from tandem.experts.store.host_memory import available_bytes, require_host_memory
from tandem.foreign_types import PreTrainedModel
from tandem.hf.checkpoint import AnyCheckpoint, Checkpoint
from tandem.hf.config import OffloadConfig
from tandem.hf.dense import packed_layers
from tandem.hf.dense_bytes import packed_dense_bytes
from tandem.hf.disk_tier import fill_slots, slots_over
from tandem.hf.row_tables import tables_on_disk
from tandem.hf.runtime import require_runtime

# If the dense parts take this share of the free memory, their pages are dropped to make room for
# experts.
_TIGHT_SHARE = 0.75
# Shorter waits show nothing.
_PATIENCE_SECONDS = 2.0


def read_packed(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    options: OffloadConfig,
    assemble: Callable[[Callable[[], None]], None],
) -> None:
    """Read a checkpoint's files into memory if they fit, and assemble its model.

    `assemble` must pack the dense parts, then call its argument, which reads the experts, and then
    start running experts. If the files do not fit, or `expert_memory` is given, experts stay on the
    disk, with host slots in memory; if the files do not fit, a warning says so. Files of tables
    that stay on the disk are not read.
    """
    places = [table.place for table in tables_on_disk(model)]
    on_disk = {part.file for place in places for part in place.parts}
    files = [file for file in checkpoint.weight_files if file not in on_disk]
    experts = [file for file in files if is_experts_file(file)]
    dense = [file for file in files if not is_experts_file(file)]
    total = _num_bytes(checkpoint.weight_files) - sum(place.num_bytes for place in places)
    available = available_bytes()
    if not experts:
        require_host_memory(total, available, what="the model's weights")
    is_on_disk = options.expert_memory_bytes is not None or total > available

    def read_experts() -> None:
        is_let_go = copy_dense_parts(model)
        if not is_on_disk:
            if is_let_go and total > _TIGHT_SHARE * available:
                let_go(dense)
            read_ahead(experts, bar.update)
        elif has_slots or slots_over(model, options):
            fill_slots(model)
            copy_out_of_files(model)  # dense weights that are not packed
            let_go(dense)
        else:
            _warn_of_mapped(checkpoint, total, available)

    # On the CPU slots come first, so that the disk fills them while linear layers are packed.
    has_slots = is_on_disk and options.device == "cpu" and _takes_slots(model, options)
    with _progress(_num_bytes(dense) if is_on_disk else total) as bar:
        read_ahead(dense, bar.update)
        fill_slots(model)
        assemble(read_experts)
    if not is_on_disk:
        map_ahead(_mapped_tensors(model))


def _takes_slots(model: PreTrainedModel, options: OffloadConfig) -> bool:
    dense_bytes = packed_dense_bytes(model, options.dense_dtype)
    return slots_over(model, options, reserved_bytes=dense_bytes)


def _warn_of_mapped(checkpoint: Checkpoint, total: int, available: int) -> None:
    warnings.warn(
        f"{checkpoint.directory} has {format_bytes(total)} and {format_bytes(available)} of "
        "memory are free: experts are read from the disk whenever they are used, which is "
        "slow; free memory or pack it in a smaller expert_dtype",
        TandemWarning,
        stacklevel=5,
    )


def verify_files(checkpoint: AnyCheckpoint, *, has_progress: bool | None = None) -> int:
    """Verify a packed checkpoint's files against their checksums; return the number of files read.

    Raises `ModelError` naming the first damaged file and tensor; returns 0 for a checkpoint without
    checksums. A check of more than two seconds shows a bar (by default, if Transformers shows
    bars).
    """
    if not checkpoint.is_packed:
        return 0
    if has_progress is None:
        has_progress = logging.is_progress_bar_enabled()
    with tqdm(
        total=_num_bytes(checkpoint.weight_files), desc="Verifying files", unit="B",
        unit_scale=True, delay=_PATIENCE_SECONDS, disable=not has_progress,
    ) as bar:  # fmt: skip
        return require_checksums(checkpoint.directory, bar.update)


def map_packed(model: PreTrainedModel, options: OffloadConfig) -> None:
    """Map all pages of a model whose files `from_pretrained` has mapped, reading missing pages.

    If the pages do not fit in memory, or `expert_memory` is given, experts stay on the disk as in
    `read_packed`.
    """
    tensors = _mapped_tensors(model)
    total, available = sum(tensor.nbytes for tensor in tensors), available_bytes()
    if options.expert_memory_bytes is not None or total > available:
        copy_out_of_files(model)
        slots_over(model, options)
        fill_slots(model)
        return
    with _progress(total) as bar:
        map_ahead(tensors, bar.update)


def _progress(total: int) -> tqdm:
    is_hidden = not logging.is_progress_bar_enabled()
    return tqdm(total=total, desc="Reading files", unit="B", unit_scale=True, disable=is_hidden)


def _mapped_tensors(model: PreTrainedModel) -> list[Tensor]:
    stored = (t for layer in require_runtime(model).store for t in layer.stored().values())
    return [*stored, *(p for p in model.parameters() if p.device.type == "cpu")]


def copy_dense_parts(model: PreTrainedModel) -> bool:
    """Copy the dense parts out of their file if a linear layer is packed; return whether one is."""
    if not any(packed_layers(model)):
        return False
    copy_out_of_files(model)
    return True


def _num_bytes(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)
