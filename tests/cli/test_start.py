"""What a command leaves out at its start, and that others' processes are left as they are."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.checkpoint.packed import INDEX_FILE
from tandem.cli import start
from tandem.cli.main import main
from tests.programs import ENVIRONMENT

SCANS = """
from tandem.cli import start
start.prepare(loads_model=True)
import gc, transformers, transformers.models
from transformers.utils import import_utils
from pathlib import Path
scan = import_utils.create_import_structure_from_path
directories = [d for d in Path(transformers.models.__file__).parent.rglob("*/") if d.is_dir()]
scanned = scan.cache_info().misses
print(scanned <= len(directories) + 2, gc.isenabled())
start.has_loaded()
print(transformers.models.mixtral.MixtralConfig().model_type, gc.isenabled())
"""


def test_transformers_looks_through_its_models_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCANS], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False", "mixtral", "True"]


def test_a_process_that_calls_main_looks_for_garbage_as_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = gc.get_threshold()
    assert main(["--version"]) == 0
    assert gc.isenabled()
    assert gc.get_threshold() == before


def test_a_packed_models_files_are_read_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def preadv(descriptor: int, buffers: object, offset: int, flags: int = 0) -> int:
        if flags:
            raise BlockingIOError  # as if it were on the disk
        read.append(offset)
        return 1

    (tmp_path / "a.safetensors").write_bytes(bytes(5))
    monkeypatch.setattr(os, "preadv", preadv)
    assert start.read_early(str(tmp_path)) is None
    (tmp_path / INDEX_FILE).write_text("{}")
    thread = start.read_early(str(tmp_path))
    assert thread is not None
    thread.join()
    assert read == [0]
    monkeypatch.setattr(start, "available_bytes", lambda: 4)
    assert start.read_early(str(tmp_path)) is None
