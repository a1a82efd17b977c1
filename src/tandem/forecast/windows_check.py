"""What WSL2, Linux inside Windows, does to Tandem: lines of `tandem doctor` and `tandem plan`.

Never run on such a PC: the files that it would read are given to the tests.
"""

from collections.abc import Iterator
from pathlib import Path

from tandem.core.units import format_bytes
from tandem.forecast.finding import Finding
from tandem.hardware import windows
from tandem.hardware.windows import ROOT


def check_windows(total_bytes: int, root: Path = ROOT) -> Iterator[Finding]:
    """Yield what WSL does to this machine, nothing outside Windows; `total_bytes` are Linux's."""
    version = windows.wsl_version(root)
    if version is None:
        return
    if version == 1:
        yield Finding(
            "Windows", "broken", "WSL 1: no GPU, and memory without huge pages",
            "wsl --set-version NAME-OF-THE-DISTRIBUTION 2, in Windows",
        )  # fmt: skip
        return
    yield Finding("Windows", "good", "WSL2, on which Tandem has not been tried yet")
    yield _share_of_memory(total_bytes, root)


def check_place(what: str, path: Path, root: Path = ROOT) -> Iterator[Finding]:
    """Yield a finding if a folder lies on a drive of Windows, which WSL reads slowly."""
    if windows.is_on_windows_drive(path, root):
        yield Finding("Windows drive", "slow", f"{what} {path}: {_SLOW_DRIVE}", _COPY)


def check_pinned_memory(root: Path = ROOT) -> Iterator[Finding]:
    """Yield what WSL2's driver does to copies; for machines with a GPU."""
    if windows.wsl_version(root) != 2:
        return
    yield Finding(
        "GPU in WSL2", "slow",
        "Windows limits pinned memory (users report .5 GB up to half of Linux's), so that most "
        "experts are copied from unpinned memory, slower; stream memory operations may be missing, "
        "which Tandem does not need",
        "keep more experts on the GPU (--gpu-memory), or start Linux itself",
    )  # fmt: skip


def huge_pages(root: Path = ROOT) -> Finding:
    """Return whether programs may have huge pages for their weights."""
    try:
        text = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    except OSError:
        if windows.wsl_version(root) is None:
            return Finding("huge pages", "good", "not Linux's, or hidden")
        return Finding(
            "huge pages", "slow", "none in this kernel",
            "wsl --update in Windows; a kernel of your own needs CONFIG_TRANSPARENT_HUGEPAGE",
        )  # fmt: skip
    if "[never]" not in text:
        return Finding("huge pages", "good", text)
    remedy = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    if windows.wsl_version(root) == 2:
        remedy += (
            f"; to keep it, in {windows.WSL_CONFIG}: [wsl2] "
            "kernelCommandLine=transparent_hugepage=madvise"
        )
    return Finding("huge pages", "slow", text, remedy)


def plan_advice(model: Path, *, fits: bool, total_bytes: int, root: Path = ROOT) -> list[str]:
    """Return what Windows has to do with a model's plan; empty on any other machine."""
    lines = [f"{model} lies on {_SLOW_DRIVE}: {_COPY}"] * windows.is_on_windows_drive(model, root)
    if not fits and windows.wsl_version(root) == 2:
        lines.append(windows.memory_advice(total_bytes, root))
    return lines


_SLOW_DRIVE = "a drive of Windows, which WSL2 reads many times slower than its own disk"
_COPY = "copy it to a folder of Linux, such as ~/models"


def _share_of_memory(total_bytes: int, root: Path) -> Finding:
    setting = windows.memory_setting(root)
    if setting is not None:
        text = f"{format_bytes(total_bytes)} for Linux, memory={setting} in .wslconfig"
        return Finding("memory of the PC", "good", text)
    text = f"{format_bytes(total_bytes)} for Linux: by default WSL2 takes half of the PC's memory"
    return Finding("memory of the PC", "slow", text, windows.memory_advice(total_bytes, root))
