"""Tests of failed reads and damaged files: one sentence, and the next request is right."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tandem
from tandem.core.errors import ModelError, TandemError
from tandem.decode.cpu_slots import CpuSlotPool
from tandem.recording.recorded_graph import RecordedGraph
from tests.disk.loading import EXPERTS, ids, slots_of, with_share

CUT, DAMAGED = -1, -2  # of a read, as csrc/disk/reader_pool.hpp numbers them


@pytest.mark.parametrize(
    ("error", "message"),
    [(CUT, "ends before"), (DAMAGED, "other bytes"), (errno.EIO, "Input/output error")],
)
@pytest.mark.parametrize("piece_bytes", [4096, 512 << 10])
def test_a_failed_read_is_a_sentence_and_the_next_request_is_right(
    packed: Path, in_memory: Any, error: int, message: str, piece_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("tandem.experts.cache.host_slots._PIECE_BYTES", piece_bytes)
    model = with_share(packed, 0.3)
    with torch.inference_mode():
        slots_of(model).native.fail(error, 2, 0.0)
        with pytest.raises(ModelError, match=message):
            model(ids(40))
        slots_of(model).native.fail(0, 0, 0.0)
        assert torch.equal(model(ids(40)).logits, in_memory(ids(40)).logits)


def test_a_failed_read_in_a_recorded_step_fails_its_request_alone(
    packed: Path, in_memory: Any
) -> None:
    model = with_share(packed, 0.3)
    generator = tandem.Generator(model)
    prompt = ids(9)[0].tolist()
    generator.generate(prompt, max_new_tokens=8)  # recorded
    slots_of(model).native.fail(errno.EIO, 2, 0.0)
    with pytest.raises(TandemError, match="Input/output error"):
        generator.generate(ids(5)[0].tolist(), max_new_tokens=20)
    slots_of(model).native.fail(0, 0, 0.0)
    (found,) = generator.generate(prompt, max_new_tokens=20)
    (right,) = tandem.Generator(in_memory).generate(prompt, max_new_tokens=20)
    assert found.token_ids == right.token_ids


@pytest.mark.parametrize("failing_step", range(4))
def test_a_read_that_fails_while_steps_are_recorded_ends_no_recording(
    packed: Path, in_memory: Any, failing_step: int
) -> None:
    model = with_share(packed, 0.0)
    pools = [
        tandem.Generator(m, speculate="none").slot_pool(1, capacity=64) for m in (model, in_memory)
    ]
    pool, _ = pools
    prompt = {0: ids(9)[0].tolist()}
    for one in pools:
        one.prefill(prompt)
    for step in range(failing_step):
        assert torch.equal(*(one.decode({0: 5 + step}) for one in pools))
    slots_of(model).native.fail(errno.EIO, 1, 0.0)
    with pytest.raises(ModelError, match="Input/output error"):
        pool.decode({0: 7})
    slots_of(model).native.fail(0, 0, 0.0)
    for one in pools:
        one.keep(0, 0)
        one.prefill(prompt)
    for step in range(8):
        assert torch.equal(*(one.decode({0: 5 + step}) for one in pools))
    assert isinstance(pool, CpuSlotPool)
    assert pool.step is not None
    assert isinstance(pool.step.recording, RecordedGraph)


def test_a_file_cut_while_it_is_in_use_is_a_sentence(packed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(packed, tmp_path / "copy")
    model = with_share(copy, 0.0)
    file = copy / "tandem-experts-00001.safetensors"
    with file.open("rb+") as stream:
        stream.truncate(file.stat().st_size // 2)
    with torch.inference_mode(), pytest.raises(ModelError, match="ends before"):
        model(ids(60))


def test_a_file_that_was_deleted_is_read_to_the_end(
    packed: Path, in_memory: Any, tmp_path: Path
) -> None:
    copy = shutil.copytree(packed, tmp_path / "copy")
    model = with_share(copy, 0.3)
    shutil.rmtree(copy)
    with torch.inference_mode():
        assert torch.equal(model(ids(60)).logits, in_memory(ids(60)).logits)


@pytest.mark.parametrize("sums", [5, {}, "x", [1], {"x": 1}, [-1] * EXPERTS, ["1"] * EXPERTS])
def test_hostile_checksums_are_a_sentence(packed: Path, tmp_path: Path, sums: object) -> None:
    copy = shutil.copytree(packed, tmp_path / "copy")
    file = copy / "tandem.safetensors.index.json"
    index = json.loads(file.read_text())
    found = index["metadata"]["expert_crc32c"]
    index["metadata"]["expert_crc32c"] = sums if sums in (5, {}) else dict.fromkeys(found, sums)
    file.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"expert_crc32c of .* expected 16 numbers"):
        tandem.load(copy, expert_memory="1GB")


def test_a_byte_that_changed_on_the_disk_is_a_sentence(packed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(packed, tmp_path / "copy")
    with (copy / "tandem-experts-00001.safetensors").open("rb+") as stream:
        stream.seek(4096 + 100)  # in the first expert
        byte = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ 1]))
    with torch.inference_mode(), pytest.raises(ModelError, match="other bytes than were written"):
        with_share(copy, 0.3)(ids(100))


def test_experts_of_another_type_are_a_sentence(packed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(packed, tmp_path / "copy")
    file = sorted(copy.glob("tandem-experts-*"))[0]
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"dtype":"U8"', b'"dtype":"I8"', 1))
    assert file.read_bytes() != data
    with pytest.raises(ModelError, match=r"type torch.int8, expected .* in bytes"):
        tandem.load(copy)
