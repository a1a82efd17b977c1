"""Measures the disk that holds packed models, for `tandem doctor`.

The findings are the disk's rates, and whether reads bypass the page cache.
"""

from collections.abc import Sequence
from pathlib import Path

from tandem.checkpoint.packed import packed_name
from tandem.core.units import format_bytes
from tandem.experts.store.packed_layer import STORED_NAME
from tandem.forecast.windows_check import Finding
from tandem.hardware.disk import measure_disk
from tandem.hardware.page_cache import Reads, how_reads_go
from tandem.hf.checkpoint import Checkpoint
from tandem.policy.cost import DiskCosts

_WHAT = "model's disk"
# SATA SSDs read half a gigabyte per second. Below that, a token with experts from the disk takes
# seconds.
_SLOW_BYTES_PER_SECOND = 0.4e9
_SECONDS = 0.3  # per depth
_CACHED = "here the page cache holds a second copy of what is read, in memory that slots could use"
_REMEDIES: dict[Reads, tuple[str, str]] = {
    "refused": ("the file system refuses O_DIRECT", f"put it on a local disk: {_CACHED}"),
    "silently buffered": (
        "the file system accepts O_DIRECT but buffers anyway",
        f"put it on a local disk: {_CACHED}",
    ),
}


def check_disk(checkpoint: Checkpoint) -> Finding | None:
    """Return a finding about the disk of a packed model, measured by reads as large as an expert.

    Returns None if the model has no packed experts, or too few bytes of them to measure.
    """
    suffix = f".{packed_name(STORED_NAME)}"
    entries = checkpoint.files.entries.items()
    experts = [e for name, e in entries if name.endswith(suffix) and e.shape and e.shape[0]]
    if not experts:
        return None
    files = sorted({entry.file for entry in experts})
    size = max(entry.num_bytes // entry.shape[0] for entry in experts)
    try:
        costs = measure_disk(files, size, seconds=_SECONDS)
    except OSError as error:
        why = f"{files[0].parent} was not measured: {error.strerror or error}"
        return Finding(_WHAT, "slow", why, "look at the disk and at who may read the files")
    return None if costs is None else disk_finding(costs, files, how_reads_go(files[0]))


def disk_finding(costs: DiskCosts, files: Sequence[Path], reads: Reads) -> Finding:
    """Return a finding with the measured rates; with a remedy if reads are buffered or slow."""
    rates = " / ".join(f"{rate / 1e9:.2f}" for rate in costs.bytes_per_second)
    depths = " / ".join(map(str, costs.depths))
    text = (
        f"{rates} GB/s in reads of {format_bytes(costs.piece_bytes)}, {depths} at once, from "
        f"{files[0].parent}"
    )
    if reads != "direct":
        found, remedy = _REMEDIES[reads]
        return Finding(_WHAT, "slow", f"{text}; {found}", remedy)
    if costs.most_bytes_per_second < _SLOW_BYTES_PER_SECOND:
        return Finding(
            _WHAT, "slow", text, "a model larger than the memory reads experts from it for every "
            "token: put packed models on an SSD",
        )  # fmt: skip
    return Finding(_WHAT, "good", f"{text}, past the page cache")
