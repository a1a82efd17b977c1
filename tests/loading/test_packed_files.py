"""Tests of packed checkpoint files: experts' places, checksums, older versions."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tandem
from tandem.checkpoint.file_writer import write_tensors
from tandem.checkpoint.packed import INDEX_FILE
from tandem.checkpoint.packed_files import require_checksums
from tandem.checkpoint.sources.safetensors_header import read_header
from tandem.core.errors import ModelError
from tandem.experts.store.packed_layer import PackedLayer
from tandem.forecast.machine_check import check_model_files
from tandem.hf.checkpoint import open_model
from tandem.kernels import _native
from tests.hf.tiny import edit_json, save_tiny_checkpoint
from tests.inside import logits_of, runtime_in
from tests.loading.checkpoints import FORMATS, write_plain, write_quantised

PAGE = 4096


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3_moe")


@pytest.fixture
def packed(checkpoint: Path, tmp_path: Path) -> Path:
    return tandem.pack(checkpoint, tmp_path / "packed", expert_dtype="int4").directory


def data_begin(file: Path) -> int:
    with file.open("rb") as stream:
        return 8 + int.from_bytes(stream.read(8), "little")


def expert_sums(directory: Path) -> dict[str, list[int]]:
    metadata = json.loads((directory / INDEX_FILE).read_text())["metadata"]
    found: dict[str, list[int]] = metadata["expert_crc32c"]
    return found


def experts_name(file: Path) -> str:
    (name,) = (name for name in read_header(file) if name.endswith("tandem_experts"))
    return name


def as_format_2(packed: Path) -> None:
    """Rewrite a packed checkpoint in format 2: whole experts, one after another."""
    layers = runtime_in(tandem.load(packed)).store
    sizes = {layer.arrivals.name: layer.image_bytes for layer in layers}
    for file in packed.glob("tandem-experts-*.safetensors"):
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        name = experts_name(file)
        size = sizes[name.rpartition(".")[0]]
        tensors[name] = tensors[name][:, :size].contiguous()
        save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())["quantization_config"]
    edit_json(packed / "config.json", quantization_config=config | {"packed_format": 2})
    edit_json(packed / INDEX_FILE, metadata={"total_size": 1})


def test_each_expert_begins_with_a_page_of_the_file(packed: Path) -> None:
    layers = runtime_in(tandem.load(packed)).store
    sums = expert_sums(packed)
    files = sorted(packed.glob("tandem-experts-*.safetensors"))
    assert len(files) == len(layers) == len(sums)
    for layer, file in zip(layers, files, strict=True):
        assert isinstance(layer, PackedLayer)
        begin, name = data_begin(file), experts_name(file)
        count, stride = read_header(file)[name].shape
        assert begin % PAGE == stride % PAGE == 0
        assert stride - PAGE < layer.layout.num_bytes <= stride
        content = file.read_bytes()[begin:]
        for expert in range(count):
            row = content[expert * stride : (expert + 1) * stride]
            whole = torch.frombuffer(bytearray(row), dtype=torch.uint8)
            assert torch.equal(whole[: layer.layout.num_bytes], layer.buffers[expert])
            assert not whole[layer.layout.num_bytes :].any()
            assert _native.crc32c(whole, 0) == sums[name][expert]


def test_orders_of_inputs_follow_the_experts(tmp_path: Path) -> None:
    fmt = FORMATS["gptq-order"]
    plain = write_plain(tmp_path / "plain", fmt.architecture)
    source = write_quantised(tmp_path / "quantised", plain, fmt)
    packed = tandem.pack(source, tmp_path / "packed").directory
    assert torch.equal(logits_of(tandem.load(packed)), logits_of(tandem.load(source)))
    (first, *_) = sorted(packed.glob("tandem-experts-*.safetensors"))
    with first.open("rb") as stream:
        header = json.loads(stream.read(data_begin(first))[8:])
    begins = {name: entry["data_offsets"][0] for name, entry in header.items() if name[0] != "_"}
    names = sorted(begins, key=lambda name: begins[name])
    assert [name.rpartition("tandem_")[2] for name in names] == ["experts", "input_order"]


def test_files_of_before_load_and_are_saved_with_gaps(packed: Path, tmp_path: Path) -> None:
    expected = logits_of(tandem.load(packed))
    files = {file.name: file.read_bytes() for file in packed.glob("*.safetensors")}
    sums = expert_sums(packed)
    as_format_2(packed)
    older = tandem.load(packed)
    assert all(file.read_bytes() != files[file.name] for file in packed.glob("tandem-experts-*"))
    assert torch.equal(logits_of(older), expected)
    again = tandem.save(older, tmp_path / "again")
    assert {file.name: file.read_bytes() for file in again.glob("*.safetensors")} == files
    assert expert_sums(again) == sums


def damage(file: Path, expert: int) -> str:
    """Flip a bit of an expert; return its tensor's name."""
    name = experts_name(file)
    content = bytearray(file.read_bytes())
    content[data_begin(file) + expert * read_header(file)[name].shape[1] + 5] ^= 1
    file.write_bytes(content)
    return name


def with_sums(packed: Path, sums: object) -> None:
    """Replace the experts' checksums."""
    metadata = json.loads((packed / INDEX_FILE).read_text())["metadata"]
    edit_json(packed / INDEX_FILE, metadata=metadata | {"expert_crc32c": sums})


def test_a_damaged_expert_is_named(packed: Path) -> None:
    name = damage(packed / "tandem-experts-00001.safetensors", 3)
    with pytest.raises(ModelError, match=rf"tensor {name} other bytes .*, of expert 3 first"):
        require_checksums(packed)


def test_a_wrong_sum_of_an_expert_is_named_though_its_file_is_whole(packed: Path) -> None:
    sums = expert_sums(packed)
    name = experts_name(packed / "tandem-experts-00001.safetensors")
    sums[name][3] ^= 1
    with_sums(packed, sums)
    message = rf"{INDEX_FILE}: the CRC-32C of expert 3 of {name} is {sums[name][3]}, and .* holds"
    with pytest.raises(ModelError, match=message):
        tandem.load(packed, verify=True)
    with pytest.raises(ModelError, match=message):
        check_model_files(open_model(packed))


@pytest.mark.parametrize("kind", ["number", "none", "other", "short", "texts", "long", "negative"])
def test_what_are_no_sums_of_experts_is_refused(packed: Path, tmp_path: Path, kind: str) -> None:
    known = expert_sums(packed)
    kinds: dict[str, Any] = {
        "number": 5,
        "none": {},
        "other": {"x": 1},
        "short": {name: one[:-1] for name, one in known.items()},
        "texts": {name: ["x"] * len(one) for name, one in known.items()},
        "long": {name: [1 << 32] * len(one) for name, one in known.items()},
        "negative": {name: [-1] * len(one) for name, one in known.items()},
    }
    with_sums(packed, kinds[kind])
    message = r"expert_crc32c of .* is .*, expected \d+ numbers of 32 bits; copy the index again"
    with pytest.raises(ModelError, match=message):
        require_checksums(packed)
    with pytest.raises(ModelError, match=message):
        tandem.save(tandem.load(packed), tmp_path / "again")
    assert list(tmp_path.iterdir()) == [packed]
    damage(packed / "tandem-experts-00000.safetensors", 0)
    with pytest.raises(ModelError, match=r"tensor .* other bytes than were written"):
        require_checksums(packed)


def test_files_without_sums_of_experts_are_verified_as_files(packed: Path, tmp_path: Path) -> None:
    sums = expert_sums(packed)
    with_sums(packed, None)
    assert require_checksums(packed) > 1
    assert expert_sums(tandem.save(tandem.load(packed), tmp_path / "again")) == sums
    damage(packed / "tandem-experts-00001.safetensors", 3)
    with pytest.raises(ModelError, match=r"tensor .* other bytes than were written;"):
        require_checksums(packed)


@pytest.mark.parametrize("options", [{}, {"expert_memory": "1GB"}], ids=["memory", "disk"])
def test_damage_is_not_saved_with_new_sums(
    packed: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    file = packed / "tandem-experts-00001.safetensors"
    name = damage(file, 3)
    model = tandem.load(packed, **options)
    with pytest.raises(ModelError, match=rf"{file.name}: expert 3 of {name} has other bytes"):
        tandem.save(model, tmp_path / "again")
    assert list(tmp_path.iterdir()) == [packed]


def test_damage_of_plain_experts_is_not_saved_with_new_sums(
    checkpoint: Path, tmp_path: Path
) -> None:
    plain = tandem.save(tandem.load(checkpoint, expert_dtype="fp32"), tmp_path / "plain")
    file = plain / "tandem-experts-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[data_begin(file)] ^= 1
    file.write_bytes(content)
    with pytest.raises(ModelError, match=rf"{file.name}: .*tandem_down_proj has other bytes"):
        tandem.save(tandem.load(plain), tmp_path / "again")
    assert list(tmp_path.iterdir()) == [plain]


def test_a_file_that_was_cut_while_it_is_in_use_is_not_saved(packed: Path, tmp_path: Path) -> None:
    model = tandem.load(packed)
    file = packed / "tandem-experts-00001.safetensors"
    os.truncate(file, file.stat().st_size - PAGE)
    with pytest.raises(ModelError, match=rf"{file.name} has \d+ bytes, expected \d+ or more"):
        tandem.save(model, tmp_path / "again")
    assert list(tmp_path.iterdir()) == [packed]


def test_every_dtype_comes_back(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    dtypes = [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32,
        torch.int64, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
    ]  # fmt: skip
    tensors = {str(d): torch.randint(2, (3, 5), generator=generator).to(d) for d in dtypes}
    tensors |= {"none": torch.empty(0, 4), "one": torch.tensor(3.0), "turned": torch.rand(3, 2).T}
    write_tensors(tmp_path, "all", tensors)
    found = load_file(tmp_path / "all")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].contiguous().view(-1).view(torch.uint8).tolist() == (
            tensor.contiguous().view(-1).view(torch.uint8).tolist()
        )


def test_what_fails_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_tensors(tmp_path, "file", {"x": torch.zeros(9)})
    assert list(tmp_path.iterdir()) == []
