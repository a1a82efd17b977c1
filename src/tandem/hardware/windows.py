"""Recognises Linux inside Windows (WSL) by its files, and gives advice for Windows and WSL2.

Written from Microsoft's and NVIDIA's documents and users' reports; never tested on a Windows PC.
"""

import configparser
import re
from pathlib import Path

ROOT = Path("/")
# The file that sets WSL2's memory, as Windows names it.
WSL_CONFIG = r"%UserProfile%\.wslconfig"
# Windows itself keeps an eighth of the PC's memory, and at least this much.
_WINDOWS_GIB = 4
_GIB = 1 << 30


def why_not_here(platform: str) -> str | None:
    """Return why Tandem cannot run on `platform` (a `sys.platform`), as text; None on Linux."""
    if platform == "linux":
        return None
    name = {"win32": "Windows", "darwin": "macOS"}.get(platform, platform)
    return (
        f"this is {name} and Tandem runs on Linux; on Windows install WSL2 (wsl --install) and run "
        "it there, on other systems use a Linux machine"
    )


def wsl_version(root: Path = ROOT) -> int | None:
    """Return the version of WSL, 1 or 2; None on any other machine."""
    try:
        release = (root / "proc/sys/kernel/osrelease").read_text().strip()
    except OSError:
        return None
    if release.endswith("-Microsoft"):
        return 1
    # A custom kernel may have another name, but it has the GPU's device.
    return 2 if "microsoft" in release.lower() or (root / "dev/dxg").exists() else None


def is_on_windows_drive(path: Path, root: Path = ROOT) -> bool:
    """Tell whether a path is on a Windows drive, such as /mnt/c; its deepest mount decides."""
    try:
        mounts = (root / "proc/self/mounts").read_text()
    except OSError:
        return False
    depth, is_of_windows = 0, False
    for line in mounts.splitlines():
        # The kernel writes spaces, tabs, line ends and backslashes as octal numbers.
        fields = [re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), f) for f in line.split(" ")]
        if len(fields) < 4 or not path.absolute().is_relative_to(fields[1]):
            continue
        device, point, kind, options = fields[:4]
        if len(Path(point).parts) >= depth:
            depth = len(Path(point).parts)
            # 9p, the newer virtiofs, or WSL 1's own type
            is_virtual = kind in ("9p", "virtiofs") and "drvfs" in device + options
            is_of_windows = kind == "drvfs" or is_virtual
    return is_of_windows


def memory_setting(root: Path = ROOT) -> str | None:
    """Return the `memory` setting of the first .wslconfig that has one; None if no file has it.

    Linux does not know which Windows user has started it, so every user's file is read.
    """
    for file in sorted((root / "mnt/c/Users").glob("*/.wslconfig")):
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        try:
            parser.read_string(file.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, configparser.Error):
            continue
        if parser.has_option("wsl2", "memory"):
            return parser.get("wsl2", "memory")
    return None


def memory_advice(total_bytes: int, root: Path = ROOT) -> str:
    """Return advice on giving WSL2, which now has `total_bytes`, more of the PC's memory.

    By default WSL2 gets half of the PC's memory. The advice is to give it all memory except a share
    for Windows.
    """
    setting = memory_setting(root)
    if setting is not None:
        return f"raise memory={setting} in {WSL_CONFIG} if the PC has more, then wsl --shutdown"
    pc_gib = round(2 * total_bytes / _GIB)
    linux_gib = max(1, pc_gib - max(_WINDOWS_GIB, pc_gib // 8))
    return (
        f"write the lines [wsl2] and memory={linux_gib}GB into {WSL_CONFIG} (on a PC of {pc_gib} "
        "GB, of which Windows keeps the rest), then wsl --shutdown"
    )
