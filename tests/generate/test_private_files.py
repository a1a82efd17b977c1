"""Tests that keys and values on disk, which reveal prompts, are readable by their user only."""

import os
import stat
from pathlib import Path

import pytest

from tandem.core.errors import ConfigError
from tandem.kv_cache.prefix_files import SEGMENT_TOKENS, PrefixFiles

TOKENS = range(SEGMENT_TOKENS)


def write_one(directory: Path) -> None:
    files = PrefixFiles(directory, 1 << 20, b"model")
    (key,) = files.keys(TOKENS)
    files.offer(key, memoryview(b"keys and values"))
    files.close(60)


def modes(directory: Path) -> dict[str, set[int]]:
    below = [directory, *directory.rglob("*")]
    found: dict[str, set[int]] = {"files": set(), "directories": set()}
    for path in below:
        kind = "directories" if path.is_dir() else "files"
        found[kind].add(stat.S_IMODE(path.stat().st_mode))
    return found


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o277])
def test_files_are_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_one(tmp_path / "kv")
    finally:
        os.umask(before)
    assert modes(tmp_path / "kv") == {"files": {0o600}, "directories": {0o700}}


def test_rights_of_what_is_there_are_mended(tmp_path: Path) -> None:
    write_one(tmp_path / "kv")
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    write_one(tmp_path / "kv")
    assert modes(tmp_path / "kv") == {"files": {0o600}, "directories": {0o700}}


def test_a_file_in_the_place_of_the_directory_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be kept in .*kv.* make it so"):
        write_one(tmp_path / "kv")
