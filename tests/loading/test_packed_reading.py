"""Tests that a packed checkpoint is read in order, even when memory is short."""

import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import tandem
from tandem.checkpoint.mapped_files import map_ahead, reading_along
from tandem.checkpoint.packed import is_dense_file
from tandem.hf import disk_tier, packed_reading
from tandem.hf.checkpoint import Checkpoint, open_model
from tandem.hf.load import files_read_along
from tests.hf.tiny import save_tiny_checkpoint
from tests.inside import logits_of, relative_error


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("models")
    source = save_tiny_checkpoint(base / "tiny", "qwen3_moe")
    return tandem.pack(source, base / "packed", expert_dtype="int8").directory


def logits(packed: Path) -> torch.Tensor:
    return logits_of(tandem.load(packed, dense_dtype="auto"))


@pytest.mark.parametrize("share", [0.0, 1.01, 100.0], ids=["too little", "just enough", "much"])
def test_answers_do_not_depend_on_free_memory(
    share: float, packed: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    expected = logits_of(tandem.load(packed, dense_dtype="none"))
    total = sum(file.stat().st_size for file in packed.glob("*.safetensors"))
    monkeypatch.setattr(packed_reading, "available_bytes", lambda: int(share * total))
    found = logits(packed)
    assert relative_error(found, expected) < 0.05  # dense parts in int8
    messages = [
        str(warning.message) for warning in recwarn if "memory are free" in str(warning.message)
    ]
    assert bool(messages) == (share < 1)


def test_the_dense_file_gives_way_only_where_memory_is_short(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[str] = []
    monkeypatch.setattr(
        packed_reading, "let_go", lambda files: dropped.extend(file.name for file in files)
    )
    total = sum(file.stat().st_size for file in packed.glob("*.safetensors"))
    for room, expected in ((100 * total, []), (total + 1, ["tandem-dense.safetensors"])):
        monkeypatch.setattr(packed_reading, "available_bytes", lambda room=room: room)
        tandem.load(packed, dense_dtype="auto")
        assert dropped == expected


@pytest.mark.parametrize("has_room", [True, False])
def test_from_pretrained_enters_all_pages_once(
    has_room: bool, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[int] = []

    def note(tensors: Iterable[torch.Tensor], on_bytes: Callable[[int], object] = int) -> None:
        entered.append(sum(tensor.nbytes for tensor in tensors))

    monkeypatch.setattr(packed_reading, "map_ahead", note)
    if not has_room:
        for module in (packed_reading, disk_tier):
            monkeypatch.setattr(module, "available_bytes", lambda: 1)
    AutoModelForCausalLM.from_pretrained(packed)
    stored = sum(file.stat().st_size for file in packed.glob("*.safetensors"))
    assert len(entered) == has_room
    assert all(0.9 * stored < num_bytes <= stored for num_bytes in entered)
    if has_room:
        tandem.load(packed)
        assert len(entered) == 2


def test_every_byte_that_is_entered_is_told(packed: Path) -> None:
    counted: list[int] = []
    with safe_open(next(packed.glob("tandem-experts*")), "pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
        map_ahead(tensors, counted.append)
        assert sum(counted) >= sum(tensor.nbytes for tensor in tensors)


def test_of_a_packed_model_the_dense_part_is_read_along(packed: Path) -> None:
    """Experts are read later, directly to their places."""
    (dense,) = files_read_along(checkpoint_of(packed))
    assert is_dense_file(dense)
    plain = checkpoint_of(packed.parent / "tiny")
    assert files_read_along(plain) == plain.weight_files


def checkpoint_of(directory: Path) -> Checkpoint:
    found = open_model(directory)
    assert isinstance(found, Checkpoint)
    return found


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="Linux")
@pytest.mark.parametrize("is_left_early", [False, True])
def test_files_are_advised_in_order_until_the_end(
    is_left_early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised: list[int] = []
    reached = threading.Event()

    def note(_descriptor: int, offset: int, size: int, _advice: int) -> None:
        advised.append(offset)
        if len(advised) == 3:
            reached.set()
            if is_left_early:
                left.wait()

    monkeypatch.setattr(os, "posix_fadvise", note)
    left = threading.Event()
    files = [tmp_path / name for name in "ab"]
    for file in files:
        file.write_bytes(bytes(300_000))
    with reading_along(files):
        assert reached.wait(10)
        if not is_left_early:
            deadline = time.monotonic() + 10
            while len(advised) < 6 and time.monotonic() < deadline:
                time.sleep(0.001)
        threading.Timer(0.05, left.set).start()
    chunk = 128 << 10
    expected = [0, chunk, 2 * chunk, 0, chunk, 2 * chunk]
    assert advised == expected[: len(advised)]
    assert (len(advised) == 6) != is_left_early
    assert not [thread for thread in threading.enumerate() if thread.name == "tandem-read-along"]
