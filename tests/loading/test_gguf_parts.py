"""Tests of GGUF models in several files, files beside them, and damaged headers."""

from pathlib import Path

import pytest
from gguf import GGUFReader, GGUFWriter

import tandem
from tandem.checkpoint.sources.gguf_header import read_header
from tandem.cli.main import main
from tandem.core.errors import ModelError, TandemWarning, UnsupportedModelError
from tests.loading.gguf_files import WIDE, tiny_model, write_gguf
from tests.loading.test_gguf import difference
from tests.loading.test_gguf_commands import add_tokenizer


def name_of(number: int) -> str:
    return f"tiny-{number:05}-of-00003.gguf"


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A directory with a model in three files, as llama.cpp's gguf-split writes it."""
    model = tiny_model(sizes=WIDE)
    write_gguf(tmp_path / "whole.gguf", model, "Q4_K_M", also=add_tokenizer)
    directory = tmp_path / "parts"
    directory.mkdir()
    writer = GGUFWriter(directory / "tiny.gguf", "qwen3moe", split_max_tensors=12)
    write_gguf(directory / "tiny.gguf", model, "Q4_K_M", also=add_tokenizer, writer=writer)
    assert sorted(file.name for file in directory.iterdir()) == [name_of(n) for n in (1, 2, 3)]
    return directory


def test_parts_are_one_model(parts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = tandem.load(parts.parent / "whole.gguf", dtype="fp32")
    assert difference(tandem.load(parts / name_of(1), dtype="fp32"), whole) == 0
    words = ["-p", "hello", "--max-new-tokens", "3", "--temperature", "0", "--quiet"]
    assert main(["run", str(parts / name_of(2)), *words]) == 0  # any part names the model
    assert capsys.readouterr().out.strip()


def test_the_header_has_what_the_gguf_package_reads(parts: Path) -> None:
    header = read_header(parts / name_of(1))
    seen = [x for n in (1, 2, 3) for x in GGUFReader(parts / name_of(n)).tensors]
    assert list(header.tensors) == [tensor.name for tensor in seen]
    for tensor in seen:
        own = header.tensors[tensor.name]
        assert own.shape == tuple(tensor.shape)
        assert own.data_offset == tensor.data_offset
        assert own.data.tobytes() == tensor.data.tobytes()


def test_a_part_that_is_not_there(parts: Path) -> None:
    (parts / name_of(3)).unlink()
    with pytest.raises(ModelError, match=r"00003-of-00003\.gguf is not there.* one of 3 parts"):
        tandem.load(parts / name_of(1))


def test_parts_with_each_others_names(parts: Path) -> None:
    (parts / name_of(2)).rename(parts / "other")
    (parts / name_of(3)).rename(parts / name_of(2))
    (parts / "other").rename(parts / name_of(3))
    with pytest.raises(ModelError, match="says that it is part 2 of 3"):
        tandem.load(parts / name_of(1))


def test_a_part_of_another_model(parts: Path) -> None:
    (parts / name_of(3)).write_bytes((parts / name_of(2)).read_bytes())
    with pytest.raises(ModelError, match="says that it is part 1 of 3"):
        tandem.load(parts / name_of(1))


def test_a_projector_is_named_as_not_read(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_model(), "Q8_0")
    writer = GGUFWriter(tmp_path / "mmproj-F16.gguf", "clip")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.warns(TandemWarning, match=r"mmproj-F16\.gguf beside model\.gguf reads images"):
        tandem.load(tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModelError, match=r"is not a model, but reads images for one"):
        tandem.load(tmp_path / "mmproj-F16.gguf")


def test_a_file_that_the_system_does_not_open_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot be opened \(Is a directory\)$"):
        read_header(tmp_path)
