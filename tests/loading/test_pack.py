"""Tests of `tandem.pack`: the files of load and save, resumable, with checksums, no leftovers."""

import contextlib
import json
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tandem
from tandem.checkpoint.packed_files import require_checksums
from tandem.cli.main import main
from tandem.core.errors import CapacityError, ModelError
from tandem.experts.store.host_store import HostLayer
from tandem.hf import packed_writer
from tests.hf.tiny import save_tiny_checkpoint
from tests.inside import logits_of
from tests.programs import python


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3_moe")


@pytest.mark.parametrize("options", [{}, {"expert_dtype": "int4", "dense_dtype": "int8"}])
def test_packing_equals_loading(checkpoint: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    target = tmp_path / "packed"
    done = tandem.pack(checkpoint, target, **options)
    assert done.directory == target
    assert torch.equal(
        logits_of(tandem.load(target)), logits_of(tandem.load(checkpoint, **options))
    )
    assert (target / "tokenizer.json").exists()
    assert list(tmp_path.iterdir()) == [target]
    names = {file.name for file in target.iterdir()}
    assert not {"lock", "packing.json", "model.safetensors.index.json"} & names


def test_packed_files_have_the_modes_of_other_new_files(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "new").touch()
    tandem.pack(checkpoint, tmp_path / "packed")
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "packed").iterdir()}
    assert set(modes.values()) == {(tmp_path / "new").stat().st_mode}, modes


def test_a_target_that_is_there_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    code = (
        "import sys; from tandem.cli.main import main\n"
        "assert main(['pack', 'no-model', '-o', sys.argv[1]]) == 2\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = python(code, str(tmp_path / "there"), imports="pass")
    assert done.returncode == 0, done.stderr
    assert "exists and is not an empty directory" in done.stderr


def test_every_file_has_its_checksum(checkpoint: Path, tmp_path: Path) -> None:
    tandem.pack(checkpoint, tmp_path / "packed", expert_dtype="int8")
    files = sorted((tmp_path / "packed").glob("*.safetensors"))
    assert require_checksums(tmp_path / "packed") == len(files)
    damaged = files[-1]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(ModelError, match=rf"{damaged.name} has the SHA-256 .*, expected"):
        require_checksums(tmp_path / "packed")


class Stopped(KeyboardInterrupt):
    """Raised in place of a user's Ctrl-C."""


def pack_until(checkpoint: Path, target: Path, num_layers: int) -> None:
    taken = 0

    def stop(done: int, total: int) -> None:
        nonlocal taken
        taken += 1
        if taken == num_layers:
            raise Stopped

    with pytest.raises(Stopped):
        tandem.pack(checkpoint, target, on_progress=stop, expert_dtype="int4")
    assert not target.exists()


def test_an_interrupted_run_is_gone_on_with(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "packed"
    pack_until(checkpoint, target, 2)
    written: list[int] = []
    take = packed_writer.FileSink.take

    def note(sink: packed_writer.FileSink, layer: HostLayer) -> None:
        written.append(layer.layer)
        take(sink, layer)

    monkeypatch.setattr(packed_writer.FileSink, "take", note)
    done = tandem.pack(checkpoint, target, expert_dtype="int4")
    assert done.resumed_layers == 2
    assert written == [2, 3]
    expected = tandem.pack(checkpoint, tmp_path / "at-once", expert_dtype="int4").directory
    for file in expected.iterdir():
        assert (target / file.name).read_bytes() == file.read_bytes(), file.name


def test_other_options_begin_anew(checkpoint: Path, tmp_path: Path) -> None:
    pack_until(checkpoint, tmp_path / "packed", 2)
    done = tandem.pack(checkpoint, tmp_path / "packed", expert_dtype="int8")
    assert done.resumed_layers == 0


def test_a_file_damaged_in_between_is_written_again(checkpoint: Path, tmp_path: Path) -> None:
    pack_until(checkpoint, tmp_path / "packed", 2)
    file = tmp_path / ".packed.partial" / "tandem-experts-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    done = tandem.pack(checkpoint, tmp_path / "packed", expert_dtype="int4")
    assert done.resumed_layers == 1
    assert require_checksums(tmp_path / "packed")


@contextlib.contextmanager
def no_file_above(num_bytes: int) -> Iterator[None]:
    """Make writes beyond a file size fail, as on a full disk."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("limit", [20_000, 60_000])  # of a layer's file, of the dense parts
def test_a_file_that_cannot_be_written_leaves_nothing(
    checkpoint: Path, tmp_path: Path, limit: int
) -> None:
    with no_file_above(limit), pytest.raises(ModelError, match=r"cannot write .*File too large"):
        tandem.pack(checkpoint, tmp_path / "packed", expert_dtype="int8")
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_reported_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(CapacityError, match=r"packing writes .* KiB of experts to .* 1000 B free"):
        tandem.pack(checkpoint, tmp_path / "packed", expert_dtype="int8")
    assert list(tmp_path.iterdir()) == []


def test_two_at_once_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "packed"

    def another(done: int, total: int) -> None:
        with pytest.raises(ModelError, match="another process packs into"):
            tandem.pack(checkpoint, target)

    tandem.pack(checkpoint, target, on_progress=another)
    assert target.exists()


def test_a_packed_checkpoint_is_not_packed_again(checkpoint: Path, tmp_path: Path) -> None:
    tandem.pack(checkpoint, tmp_path / "packed")
    with pytest.raises(ModelError, match="is packed already"):
        tandem.pack(tmp_path / "packed", tmp_path / "again")


def test_the_command_reports(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "packed"
    words = ["pack", str(checkpoint), "-o", str(target), "--expert-dtype", "int4", "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["directory"] == str(target)
    assert report["bytes"] > 0
    assert main(words) == 2
    assert "not an empty directory" in capsys.readouterr().err
    # This comes before the model is looked up, which may be a long download.
    assert main(["pack", "nobody/nothing", "-o", str(target)]) == 2
    assert "not an empty directory" in capsys.readouterr().err
