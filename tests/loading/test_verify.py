"""Tests of `verify`: checksums of packed files; damage is named by file and tensor."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

import tandem
from tandem.checkpoint.packed import INDEX_FILE
from tandem.checkpoint.packed_files import require_checksums
from tandem.cli.main import main
from tandem.core.errors import ModelError
from tandem.hf import packed_reading
from tandem.hf.checkpoint import open_model
from tests.hf.tiny import edit_json, save_tiny_checkpoint

RUN = ("-p", "hello", "--max-new-tokens", "2", "--threads", "1", "--no-keep", "--json")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def packed(checkpoint: Path, tmp_path: Path) -> Path:
    return tandem.pack(checkpoint, tmp_path / "packed", expert_dtype="int8").directory


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def edit_metadata(packed: Path, **changes: object) -> None:
    metadata = json.loads((packed / INDEX_FILE).read_text())["metadata"]
    edit_json(packed / INDEX_FILE, metadata=metadata | changes)


def place_of(file: Path, tensor: str) -> int:
    """Return the offset of a tensor's first byte."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    return 8 + length + int(header[tensor]["data_offsets"][0])


def test_a_flipped_byte_is_named_by_file_and_tensor(packed: Path) -> None:
    for file in sorted(packed.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            names = list(opened.keys())
        for name in (names[0], names[-1]):
            place = place_of(file, name)
            flip(file, place)
            with pytest.raises(ModelError) as refused:
                tandem.load(packed, verify=True)
            assert file.name in str(refused.value)
            assert f"tensor {name} other bytes" in str(refused.value)
            flip(file, place)
    assert tandem.load(packed, verify=True) is not None


def test_a_header_that_was_changed_is_named(packed: Path) -> None:
    file = packed / "tandem-dense.safetensors"
    flip(file, file.read_bytes().index(b'"pt"') + 1)
    with pytest.raises(
        ModelError, match=r"tandem-dense.safetensors has the SHA-256 .* in its header"
    ):
        require_checksums(packed)


@pytest.mark.parametrize("sums", [None, 5, [1], {}, {"no": 1}])
def test_a_damaged_file_is_refused_whatever_the_sums_of_tensors_are(
    packed: Path, sums: object
) -> None:
    edit_metadata(packed, crc32=sums)
    assert require_checksums(packed) > 1
    flip(packed / "tandem-dense.safetensors", -1)
    with pytest.raises(ModelError, match=r"tandem-dense.safetensors has the SHA-256 .*; the disk"):
        require_checksums(packed)


def test_a_file_of_another_form_is_refused(packed: Path) -> None:
    (packed / "tandem-dense.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(
        ModelError, match=r"tandem-dense.safetensors has the SHA-256 .* header; the"
    ):
        require_checksums(packed)


@pytest.mark.parametrize("sums", [{"other": "0" * 64}, {"tandem-dense.safetensors": 5}, [1], 5])
def test_a_file_without_a_sum_beside_others_is_refused(packed: Path, sums: object) -> None:
    edit_metadata(packed, sha256=sums)
    with pytest.raises(ModelError, match="has no SHA-256 of tandem-"):
        tandem.load(packed, verify=True)


@pytest.mark.parametrize("metadata", [{}, {"sha256": None}])
def test_what_has_no_sums_is_not_called_verified(packed: Path, metadata: object) -> None:
    edit_json(packed / INDEX_FILE, metadata=metadata)
    assert require_checksums(packed) == 0
    with pytest.raises(ModelError, match="has no checksums to verify"):
        tandem.load(packed, verify=True)


def test_an_unpacked_model_has_no_sums(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match="has no checksums to verify"):
        tandem.load(checkpoint, verify=True)


def test_a_command_verifies_before_it_answers(
    packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(packed), *RUN, "--verify"]) == 0
    file = packed / "tandem-experts-00000.safetensors"
    with safe_open(file, "pt") as opened:
        name = next(iter(opened.keys()))
    flip(file, place_of(file, name))
    assert main(["run", str(packed), *RUN]) == 0  # as documented: loading alone does not verify
    capsys.readouterr()
    assert main(["run", str(packed), *RUN, "--verify"]) == 2
    out, err = capsys.readouterr()
    assert f"{file.name} has the SHA-256" in err
    assert f"tensor {name} other bytes" in err
    assert f"tensor {name} other bytes" in json.loads(out)["error"]["message"]
    assert "Traceback" not in err


def test_a_long_reading_shows_its_progress(
    packed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(packed)
    packed_reading.verify_files(model, has_progress=True)
    assert capsys.readouterr().err == ""  # it takes less than two seconds
    monkeypatch.setattr(packed_reading, "_PATIENCE_SECONDS", 0.0)
    assert packed_reading.verify_files(model, has_progress=True) > 1
    assert "Verifying files: 100%" in capsys.readouterr().err
