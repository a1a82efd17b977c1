"""Tests of `tandem doctor` and `tandem plan` inside Windows, with files as in WSL2."""

import sys
from pathlib import Path

import pytest

from tandem.cli.main import main
from tandem.core.errors import CapacityError
from tandem.experts.store import host_memory, pinning
from tandem.forecast.windows_check import Finding, check_place, check_windows, plan_advice
from tandem.hardware.windows import (
    is_on_windows_drive,
    memory_advice,
    memory_setting,
    wsl_version,
)

WSL2 = "5.15.167.4-microsoft-standard-WSL2"
WSL1 = "4.4.0-19041-Microsoft"
DEBIAN = "6.1.0-31-amd64"
MOUNTS = r"""/dev/sdc / ext4 rw,relatime,discard 0 0
none /mnt/wslg tmpfs rw,relatime 0 0
C:\134 /mnt/c 9p rw,noatime,aname=drvfs;path=C:\;uid=1000;gid=1000,trans=fd,rfd=5,wfd=5 0 0
D:\134 /mnt/my\040models 9p rw,noatime,aname=drvfs;path=D:\;uid=1000,trans=fd 0 0
drvfs /mnt/e virtiofs rw,noatime 0 0
F: /mnt/f drvfs rw,noatime 0 0
share /srv/share 9p rw,relatime,trans=virtio 0 0
/dev/sdd /mnt/c/linux ext4 rw,relatime 0 0
broken
"""
GIB = 1 << 30


def machine(
    root: Path, *, kernel: str = WSL2, wsl_config: str | None = None, pages: str | None = None
) -> Path:
    """Write the files that describe a machine; return their root directory."""
    files = {"proc/sys/kernel/osrelease": kernel + "\n", "proc/self/mounts": MOUNTS}
    if wsl_config is not None:
        files["mnt/c/Users/Public/.wslconfig"] = "[experimental]\nsparseVhd=true\n"
        files["mnt/c/Users/me/.wslconfig"] = wsl_config
    if pages is not None:
        files["sys/kernel/mm/transparent_hugepage/enabled"] = pages + "\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def findings(root: Path, total_bytes: int = GIB) -> list[Finding]:
    return [*check_windows("Windows", "memory of the PC", total_bytes=total_bytes, root=root)]


@pytest.mark.parametrize(("kernel", "version"), [(WSL2, 2), (WSL1, 1), (DEBIAN, None)])
def test_the_kernel_tells_wsl(tmp_path: Path, kernel: str, version: int | None) -> None:
    assert wsl_version(machine(tmp_path, kernel=kernel)) == version


def test_a_kernel_of_ones_own_is_known_by_the_gpu(tmp_path: Path) -> None:
    root = machine(tmp_path, kernel="6.6.1-mine")
    (root / "dev").mkdir()
    (root / "dev/dxg").touch()
    assert wsl_version(root) == 2
    assert wsl_version(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("path", "is_of_windows"),
    [
        ("/mnt/c/Users/me/model", True),
        ("/mnt/my models/model", True),
        ("/mnt/e/model", True),
        ("/mnt/f/model", True),
        ("/mnt/c/linux/model", False),
        ("/mnt/cd/model", False),
        ("/srv/share/model", False),
        ("/home/me/model", False),
    ],
)
def test_which_drive_holds_a_path(tmp_path: Path, path: str, is_of_windows: bool) -> None:
    assert is_on_windows_drive(Path(path), machine(tmp_path)) == is_of_windows


def test_a_model_on_a_drive_of_windows_is_slow(tmp_path: Path) -> None:
    root = machine(tmp_path)
    (finding,) = check_place("the model", Path("/mnt/c/models/qwen"), root)
    assert finding.state == "slow"
    assert "/mnt/c/models/qwen" in finding.found
    assert "~/models" in finding.remedy
    assert list(check_place("the model", Path("/home/me/qwen"), root)) == []
    assert list(check_place("the model", Path("/mnt/c/qwen"), tmp_path / "nothing")) == []


def test_memory_without_a_setting_is_half_of_the_pc(tmp_path: Path) -> None:
    windows, memory = findings(machine(tmp_path), 16 * GIB)
    assert windows.state == "good"
    assert memory.state == "slow"
    assert "[wsl2] and memory=28GB" in memory.remedy
    assert "wsl --shutdown" in memory.remedy


@pytest.mark.parametrize(("seen", "proposed"), [(1.5, 1), (8, 12), (15.5, 27), (32, 56), (62, 109)])
def test_windows_keeps_an_eighth_and_at_least_four_gigabytes(
    tmp_path: Path, seen: float, proposed: int
) -> None:
    assert f"memory={proposed}GB" in memory_advice(int(seen * GIB), machine(tmp_path))


def test_a_setting_of_the_users_is_read(tmp_path: Path) -> None:
    root = machine(tmp_path, wsl_config="\ufeff[wsl2]\r\nMemory = 28GB\r\nswap=0\r\n")
    assert memory_setting(root) == "28GB"
    _, memory = findings(root, 28 * GIB)
    assert (memory.state, "memory=28GB" in memory.found) == ("good", True)
    assert "raise memory=28GB" in memory_advice(28 * GIB, root)


@pytest.mark.parametrize("text", ["[wsl2]\nprocessors=4\n", "no section\n", "[wsl2\n"])
def test_a_file_without_the_setting_is_no_setting(tmp_path: Path, text: str) -> None:
    assert memory_setting(machine(tmp_path, wsl_config=text)) is None


def test_wsl_1_is_broken_and_linux_says_nothing(tmp_path: Path) -> None:
    (finding,) = findings(machine(tmp_path / "1", kernel=WSL1))
    assert (finding.state, "--set-version" in finding.remedy) == ("broken", True)
    assert findings(machine(tmp_path / "linux", kernel=DEBIAN)) == []


def test_pinned_memory_is_limited_inside_windows_only(tmp_path: Path) -> None:
    (finding,) = check_windows("GPU in WSL2", root=machine(tmp_path / "2"))
    assert finding.state == "slow"
    assert "stream memory operations" in finding.found
    linux = machine(tmp_path / "linux", kernel=DEBIAN)
    assert list(check_windows("GPU in WSL2", root=linux)) == []


@pytest.mark.parametrize(
    ("kernel", "pages", "state", "remedy"),
    [
        (DEBIAN, "always [madvise] never", "good", ""),
        (DEBIAN, None, "good", ""),
        (DEBIAN, "always madvise [never]", "slow", "echo madvise"),
        (WSL2, "[always] madvise never", "good", ""),
        (WSL2, None, "slow", "wsl --update"),
        (WSL2, "always madvise [never]", "slow", "kernelCommandLine=transparent_hugepage=madvise"),
    ],
)
def test_huge_pages(
    tmp_path: Path, kernel: str, pages: str | None, state: str, remedy: str
) -> None:
    root = machine(tmp_path, kernel=kernel, pages=pages)
    (finding,) = check_windows("huge pages", root=root)
    assert finding.state == state
    assert remedy in finding.remedy
    assert bool(remedy) == bool(finding.remedy)


def test_a_plan_names_the_drive_and_the_memory(tmp_path: Path) -> None:
    root = machine(tmp_path)
    drive, memory = plan_advice(Path("/mnt/c/qwen"), fits=False, total_bytes=8 * GIB, root=root)
    assert drive.startswith("/mnt/c/qwen lies on a drive of Windows")
    assert "memory=12GB" in memory
    assert plan_advice(Path("/home/qwen"), fits=True, total_bytes=8 * GIB, root=root) == []
    linux = machine(tmp_path / "linux", kernel=DEBIAN)
    assert plan_advice(Path("/home/qwen"), fits=False, total_bytes=GIB, root=linux) == []


def test_too_little_memory_inside_windows_names_the_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "wsl_version", lambda: 2)
    with pytest.raises(CapacityError, match=r"memory=\d+GB"):
        host_memory.require_host_memory(2, 1, what="the experts")
    monkeypatch.setattr(host_memory, "wsl_version", lambda: None)
    with pytest.raises(CapacityError, match=r"smaller model$"):
        host_memory.require_host_memory(2, 1, what="the experts")


def test_too_little_pinned_memory_names_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "wsl_version", lambda: 2)
    assert "Windows" in pinning._no_more_pinned()
    monkeypatch.setattr(pinning, "wsl_version", lambda: None)
    assert "ulimit -l" in pinning._no_more_pinned()


@pytest.mark.parametrize(
    ("platform", "words"), [("win32", "this is Windows"), ("darwin", "this is macOS")]
)
def test_other_systems_get_one_sentence(
    platform: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert main(["run", "-p", "x"]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert words in errors
    assert "WSL2" in errors
