"""Tests of false headers, indexes and configs: one sentence each, only the model's files."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.core.errors import ModelError
from tandem.hf.checkpoint import open_model
from tests.hf.tiny import edit_json

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"


def edit_header(checkpoint: Path, change: Any) -> str:
    """Change the header entry of the first file's first tensor; return its name."""
    file = min(checkpoint.glob("*.safetensors"))
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    header[name] = change(header[name])
    write_header(file, json.dumps(header).encode(), data[8 + length :])
    return name


def write_header(file: Path, header: bytes, data: bytes) -> None:
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda entry: entry | {"shape": None}, "shape is null, expected a list of whole numbers"),
        (lambda entry: entry | {"shape": [-1, 4]}, r"shape is \[-1, 4\], expected"),
        (lambda entry: entry | {"shape": [1.5]}, r"shape is \[1\.5\], expected"),
        (lambda entry: entry | {"shape": [1 << 62, 1 << 62]}, r"takes \d+ bytes by its shape"),
        (lambda entry: entry | {"dtype": 7}, "dtype is 7, expected one of"),
        (lambda entry: entry | {"dtype": "F99"}, "dtype is 'F99', expected one of"),
        (lambda entry: entry | {"data_offsets": [0]}, r"data_offsets is \[0\], expected two"),
        (lambda entry: entry | {"data_offsets": ["0", "8"]}, "data_offsets is .* expected two"),
        (lambda entry: entry | {"data_offsets": [8, 0]}, "data_offsets is .* expected two"),
        (lambda entry: entry | {"data_offsets": [-8, 0]}, "data_offsets is .* expected two"),
        (lambda entry: {}, "dtype is null, expected one of"),
        (lambda entry: None, "is null, expected an object"),
        (lambda entry: [], r"is \[\], expected an object"),
    ],
)
def test_a_header_entry_of_another_type(checkpoint: Path, change: Any, sentence: str) -> None:
    name = edit_header(checkpoint, change)
    with pytest.raises(ModelError, match=rf"{name}.*{sentence}"):
        open_model(checkpoint)


DEEP = [b"[" * 5000, b"{" * 5000, b'{"a":' * 5000, b"[" * 100_000]


@pytest.mark.parametrize("header", DEEP, ids=range(len(DEEP)))
def test_a_header_that_is_nested_deep(checkpoint: Path, header: bytes) -> None:
    write_header(min(checkpoint.glob("*.safetensors")), header, b"")
    with pytest.raises(ModelError, match=r"safetensors is damaged \("):
        open_model(checkpoint)


def test_a_header_that_says_a_tensor_twice(checkpoint: Path) -> None:
    file = min(checkpoint.glob("*.safetensors"))
    entry = b'"a": {"dtype": "U8", "shape": [%d], "data_offsets": [0, %d]}'
    write_header(file, b"{%s, %s}" % (entry % (1, 1), entry % (2, 2)), b"\0\0")
    with pytest.raises(ModelError, match="names a twice"):
        open_model(checkpoint)


def test_tensors_that_share_bytes_or_leave_some_out(checkpoint: Path) -> None:
    file = min(checkpoint.glob("*.safetensors"))
    entry = b'"%s": {"dtype": "U8", "shape": [4], "data_offsets": [%d, %d]}'
    for first, second in ((0, 2), (0, 6), (2, 6)):
        header = b"{%s, %s}" % (
            entry % (b"a", first, first + 4),
            entry % (b"b", second, second + 4),
        )
        write_header(file, header, b"\0" * (second + 4))
        with pytest.raises(ModelError, match=r"begins at byte \d of the data, expected"):
            open_model(checkpoint)


@pytest.mark.parametrize(
    "value", [-1, None, 5, [], {}, ["a.safetensors"], "", ".", "a\0b", "x" * 300]
)
def test_an_index_value_that_is_no_file_name(checkpoint: Path, value: object) -> None:
    weight_map = json.loads((checkpoint / INDEX).read_text())["weight_map"]
    name = next(iter(weight_map))
    edit_json(checkpoint / INDEX, weight_map=weight_map | {name: value})
    with pytest.raises(ModelError, match=rf"{name}.* is in .*, expected the name of a file"):
        open_model(checkpoint)


@pytest.mark.parametrize("way", ["../{}", "sub/../../{}", "{absolute}"])
def test_an_index_names_no_file_outside_its_directory(checkpoint: Path, way: str) -> None:
    shard = min(checkpoint.glob("*.safetensors"))
    outside = shard.rename(checkpoint.parent / shard.name)
    named = way.format(shard.name, absolute=outside)
    weight_map = json.loads((checkpoint / INDEX).read_text())["weight_map"]
    moved = {name: named for name, file in weight_map.items() if file == shard.name}
    edit_json(checkpoint / INDEX, weight_map=weight_map | moved)
    with pytest.raises(ModelError, match="expected the name of a file in its directory"):
        open_model(checkpoint)


def test_files_of_a_hub_cache_are_links_out_of_their_directory(checkpoint: Path) -> None:
    for shard in checkpoint.glob("*.safetensors"):
        shard.rename(checkpoint.parent / shard.name)
        shard.symlink_to(Path("..") / shard.name)
    tandem.load(checkpoint)


NO_JSON = [
    "[" * 5000,
    '{"a":' * 5000 + "1" + "}" * 5000,
    '{"a": ' + "[" * 90 + "]" * 90 + "}",
    '{"a": "\\ud800"}',
    '{"\\udfff": 1}',
    '{"a": 1' + "0" * 5000 + "}",
    '{"a": \udcff}',
    "\0",
    "",
]


@pytest.mark.parametrize("file", [INDEX, CONFIG, "generation_config.json"])
@pytest.mark.parametrize("text", NO_JSON, ids=range(len(NO_JSON)))
def test_json_that_python_would_not_survive(checkpoint: Path, file: str, text: str) -> None:
    (checkpoint / file).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ModelError, match=rf"{file} is not valid JSON \("):
        open_model(checkpoint)


@pytest.mark.parametrize("file", [INDEX, CONFIG, "generation_config.json"])
def test_a_directory_or_a_pipe_in_place_of_a_file(checkpoint: Path, file: str) -> None:
    (checkpoint / file).unlink()
    os.mkfifo(checkpoint / file)
    with pytest.raises(ModelError, match=rf"{file} is not a file"):
        open_model(checkpoint)
    (checkpoint / file).unlink()
    (checkpoint / file).mkdir()
    with pytest.raises(ModelError, match=rf"{file} is not a file"):
        open_model(checkpoint)


def test_a_sentence_stays_short(checkpoint: Path) -> None:
    edit_json(checkpoint / CONFIG, hidden_size="9" * 100_000)
    with pytest.raises(ModelError) as caught:
        open_model(checkpoint)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("metadata", [5, [], None, "x"], ids=range(4))
def test_an_index_with_metadata_of_another_type(checkpoint: Path, metadata: object) -> None:
    edit_json(checkpoint / INDEX, metadata=metadata)
    with pytest.raises(ModelError, match=r"metadata is .*, expected an object"):
        open_model(checkpoint)
