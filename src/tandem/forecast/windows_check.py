"""Checks for WSL2, Linux inside Windows: a table for `tandem doctor` and `tandem plan`.

These checks have never run on a PC with WSL2: tests supply the files that they would read.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from tandem.core.units import format_bytes
from tandem.hardware.windows import (
    ROOT,
    WSL_CONFIG,
    is_on_windows_drive,
    memory_advice,
    memory_setting,
    wsl_version,
)

_SLOW_DRIVE = "a drive of Windows, which WSL2 reads many times slower than its own disk"
_COPY = "copy it to a folder of Linux, such as ~/models"
_HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"
_KEEP = f"; to keep it, in {WSL_CONFIG}: [wsl2] kernelCommandLine=transparent_hugepage=madvise"
State = Literal["good", "slow", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One checked item: a line of `tandem doctor`."""

    what: str
    state: State
    found: str
    remedy: str = ""


class _Facts(NamedTuple):
    """What the machine's files say about WSL, its memory setting and huge pages."""

    wsl: int | None
    setting: str | None
    """The setting `memory` of .wslconfig."""
    pages: str | None
    """The mode of transparent huge pages; None: the kernel has none, or hides it."""


# (condition, finding). Texts may contain the facts `total`, `advice` and `keep`.
_TABLE: tuple[tuple[Callable[[_Facts], bool], Finding], ...] = (
    (lambda f: f.pages is None and f.wsl is None,
     Finding("huge pages", "good", "not Linux's, or hidden")),
    (lambda f: f.pages is None and f.wsl is not None,
     Finding("huge pages", "slow", "none in this kernel", "wsl --update in Windows; a kernel of "
             "your own needs CONFIG_TRANSPARENT_HUGEPAGE")),
    (lambda f: f.pages is not None and "[never]" not in f.pages,
     Finding("huge pages", "good", "{pages}")),
    (lambda f: f.pages is not None and "[never]" in f.pages,
     Finding("huge pages", "slow", "{pages}", f"echo madvise | sudo tee /{_HUGE_PAGES}{{keep}}")),
    (lambda f: f.wsl == 1,
     Finding("Windows", "broken", "WSL 1: no GPU, and memory without huge pages",
             "wsl --set-version NAME-OF-THE-DISTRIBUTION 2, in Windows")),
    (lambda f: f.wsl == 2,
     Finding("Windows", "good", "WSL2, on which Tandem has not been tried yet")),
    (lambda f: f.wsl == 2 and f.setting is not None,
     Finding("memory of the PC", "good", "{total} for Linux, memory={setting} in .wslconfig")),
    (lambda f: f.wsl == 2 and f.setting is None,
     Finding("memory of the PC", "slow",
             "{total} for Linux: by default WSL2 takes half of the PC's memory", "{advice}")),
    (lambda f: f.wsl == 2,
     Finding("GPU in WSL2", "slow", "Windows limits pinned memory (users report .5 GB up to half "
             "of Linux's), so that most experts are copied from unpinned memory, slower; stream "
             "memory operations may be missing, which Tandem does not need",
             "keep more experts on the GPU (--gpu-memory), or start Linux itself")),
)  # fmt: skip


def check_windows(*kinds: str, total_bytes: int = 0, root: Path = ROOT) -> Iterator[Finding]:
    """Yield the findings whose `what` is in `kinds`; `total_bytes` is the memory Linux sees."""
    try:
        pages: str | None = (root / _HUGE_PAGES).read_text().strip()
    except OSError:
        pages = None
    facts = _Facts(wsl_version(root), memory_setting(root), pages)
    names = {
        **facts._asdict(),
        "total": format_bytes(total_bytes),
        "advice": memory_advice(total_bytes, root),
        "keep": _KEEP if facts.wsl == 2 else "",
    }
    for applies, row in _TABLE:
        if row.what in kinds and applies(facts):
            found, remedy = row.found.format(**names), row.remedy.format(**names)
            yield replace(row, found=found, remedy=remedy)


def check_place(what: str, path: Path, root: Path = ROOT) -> Iterator[Finding]:
    """Yield a finding if a folder is on a Windows drive, which WSL reads slowly."""
    if is_on_windows_drive(path, root):
        yield Finding("Windows drive", "slow", f"{what} {path}: {_SLOW_DRIVE}", _COPY)


def plan_advice(model: Path, *, fits: bool, total_bytes: int, root: Path = ROOT) -> list[str]:
    """Return advice about WSL2's memory and Windows drives for a model's plan; [] outside WSL."""
    lines = [f"{model} lies on {_SLOW_DRIVE}: {_COPY}"] * is_on_windows_drive(model, root)
    if not fits and wsl_version(root) == 2:
        lines.append(memory_advice(total_bytes, root))
    return lines
