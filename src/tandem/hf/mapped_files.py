"""Checkpoint files are mapped while they are read; what stays of them in a loaded model."""

from bisect import bisect_right
from pathlib import Path

from torch import nn


def copy_out_of_files(model: nn.Module) -> None:
    """Give the dense weights memory of their own, so that the files behind them can be let go.

    A weight that is loaded in the dtype of its file is a view of the mapped file, and one such view
    keeps all pages of the file that were read, experts included, in the process.
    """
    ranges = _mapped_ranges()
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type == "cpu" and _is_inside(tensor.data_ptr(), ranges):
            tensor.data = tensor.data.clone()


def _mapped_ranges() -> list[tuple[int, int]]:
    """Return (first, last + 1) addresses of this process's mapped checkpoint files, in order."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux
        return []
    found = []
    for line in lines:
        addresses, *_, name = line.split(maxsplit=5)
        if name.endswith(".safetensors"):
            first, _, end = addresses.partition("-")
            found.append((int(first, 16), int(end, 16)))
    return sorted(found)


def _is_inside(address: int, ranges: list[tuple[int, int]]) -> bool:
    place = bisect_right(ranges, (address, 1 << 64)) - 1
    return place >= 0 and ranges[place][0] <= address < ranges[place][1]
