"""Tests that tables of rows on the disk give the bits of memory; a failed read is an error."""

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

import tandem
from tandem.core.errors import CapacityError, ModelError, TandemError
from tandem.forecast.sizes import ModelSizes, model_sizes
from tandem.hf.checkpoint import open_checkpoint
from tandem.hf.config import OffloadConfig
from tandem.hf.packed_writer import FileSink
from tandem.hf.row_tables import DiskEmbedding, tables_on_disk
from tandem.kernels import _native
from tests.architecture_sizes import VOCABULARY
from tests.architectures import build_tiny_model
from tests.decode.twin_capture import TwinCapture
from tests.decode.whole_pool import cuda_pool, gpu_pool, logits_of
from tests.disk.loading import slots_of, with_share
from tests.disk.test_architectures import outputs_of
from tests.forecast.test_plan import plan
from tests.loading.checkpoints import FORMATS, write_plain, write_quantised
from tests.shadow.device import shadow_gpu
from tests.shadow.models import (
    PROMPTS,
    TOKENS,
    assert_same,
    in_dry_gpu,
    loaded,
    model_outputs,
    outputs_on_cpu,
    quick_loads,
)

NAMES = ("qwen4_exp", "gemma4")  # n-grams in layers 1 and 3, in four parts; one table for all
CUT = -1  # of a read, as csrc/disk/reader_pool.hpp numbers them
FILE = "tandem-rows-00000.safetensors"


@pytest.fixture(autouse=True)
def _tables_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.hf.row_tables._LEAST_BYTES", 0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each architecture, plain and packed."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem.hf.row_tables._LEAST_BYTES", 0)
        for name in NAMES:
            found[name] = folder = tmp_path_factory.mktemp(name)
            build_tiny_model(name).save_pretrained(folder / "plain")
            tandem.pack(folder / "plain", folder / "packed", expert_dtype="int8")
    return found


@pytest.fixture(params=NAMES)
def packed(folders: dict[str, Path], request: pytest.FixtureRequest) -> Path:
    return folders[request.param] / "packed"


def sizes_of(folder: Path) -> ModelSizes:
    checkpoint = open_checkpoint(folder)
    expert_dtype = "int8" if checkpoint.quantization is None else "auto"
    return model_sizes(checkpoint, OffloadConfig(expert_dtype=expert_dtype))


def room_for_half_of_the_tables(folder: Path) -> int:
    sizes = sizes_of(folder)
    return sizes.experts_bytes + sizes.total_dense_bytes - sizes.dense_bytes["tables of rows"] // 2


@contextmanager
def memory_of(room: int) -> Iterator[None]:
    """Pretend that a load finds this much free memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem.experts.store.host_memory.available_bytes", lambda: room)
        yield


def from_disk(folder: Path, load: Any = tandem.load, **options: Any) -> Any:
    with (
        memory_of(room_for_half_of_the_tables(folder)),
        pytest.warns(UserWarning, match="of tables of which a token reads a few rows"),
    ):
        model = load(folder, **options)
    assert tables_on_disk(model)
    return model


def native_of(model: Any) -> _native.RowTables:
    return tables_on_disk(model)[0].tables


def ids(count: int, seed: int = 3) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCABULARY, (1, count), generator=random)


@pytest.mark.seam
@pytest.mark.parametrize("form", ["plain", "packed"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_from_the_disk_have_the_bits_of_memory(
    folders: dict[str, Path], name: str, form: str
) -> None:
    folder = folders[name] / form
    options: dict[str, Any] = {"expert_dtype": "int8"} if form == "plain" else {}
    in_memory, model = tandem.load(folder, **options), from_disk(folder, **options)
    assert not tables_on_disk(in_memory)
    for found, right in zip(outputs_of(model), outputs_of(in_memory), strict=True):
        assert torch.equal(found, right)
    with torch.inference_mode():  # more rows than are requested at once
        assert torch.equal(model(ids(200)).logits, in_memory(ids(200)).logits)
    assert native_of(model).counts().rows > 200
    assert model.num_parameters() == in_memory.num_parameters()


@pytest.mark.parametrize("name", NAMES)
def test_a_quantised_checkpoint_s_tables_stay_on_the_disk(tmp_path: Path, name: str) -> None:
    plain = write_plain(tmp_path / "plain", name)
    folder = write_quantised(tmp_path / "int8", plain, FORMATS["packed-int8"])
    in_memory, model = tandem.load(folder), from_disk(folder)
    with torch.inference_mode():
        assert torch.equal(model(ids(20)).logits, in_memory(ids(20)).logits)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_rows_of_another_dtype_than_the_model_s_have_the_bits_of_memory(
    folders: dict[str, Path], dtype: str
) -> None:
    packed = folders["gemma4"] / "packed"
    in_memory = tandem.load(packed, dtype=dtype)
    with memory_of(1), pytest.warns(UserWarning, match="of tables"):
        model = tandem.load(packed, dtype=dtype)
    assert tables_on_disk(model)
    with torch.inference_mode():
        assert torch.equal(model(ids(20)).logits, in_memory(ids(20)).logits)


def test_steps_of_several_sequences_have_the_tokens_of_memory(packed: Path) -> None:
    prompts = [ids(count, count)[0].tolist() for count in (3, 20, 45)]
    generators = [tandem.Generator(load(packed)) for load in (tandem.load, from_disk)]
    right, found = (one.generate(prompts, max_new_tokens=12) for one in generators)
    assert [one.token_ids for one in found] == [one.token_ids for one in right]
    assert [one.why_slower for one in generators] == [None, None]


def test_from_pretrained_and_other_devices_leave_tables_on_the_disk(
    packed: Path, profile: str
) -> None:
    model = from_disk(packed, AutoModelForCausalLM.from_pretrained)
    on_device = from_disk(packed, device="emulated", gpu_memory="300KB", profile=profile)
    expected = tandem.load(packed)
    with torch.inference_mode():
        for one in (model, on_device):
            assert torch.equal(one(ids(30)).logits, expected(ids(30)).logits)


def test_experts_and_tables_are_on_the_disk_together(packed: Path) -> None:
    expected = tandem.load(packed)
    with memory_of(1), pytest.warns(UserWarning, match="of tables"):
        model = with_share(packed, 0.4)
    with torch.inference_mode():
        assert torch.equal(model(ids(60)).logits, expected(ids(60)).logits)
    assert slots_of(model).statistics().misses > 0
    assert tables_on_disk(model)


def test_a_table_has_a_file_whose_rows_begin_at_a_page(packed: Path) -> None:
    names = set()
    for file in sorted(packed.glob("tandem-rows-*.safetensors")):
        with safe_open(file, "pt") as opened:
            (name,) = opened.keys()
        names.add(name)
        with file.open("rb") as stream:
            assert (8 + int.from_bytes(stream.read(8), "little")) % 4096 == 0
    words = "ngram_embedding.weight", "embed_tokens_per_layer.weight"
    assert names == {name for name in tandem.load(packed).state_dict() if name.endswith(words)}


def test_a_model_with_tables_on_the_disk_is_written_with_them(packed: Path, tmp_path: Path) -> None:
    copy = tandem.save(from_disk(packed), tmp_path / "copy")
    for file in packed.glob("*.safetensors"):
        assert (copy / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("harm", "message"),
    [("damage", r"has other bytes than were written"), ("cut", "cannot be read")],
)
def test_a_table_that_was_damaged_is_not_saved_with_a_new_sum(
    packed: Path, tmp_path: Path, harm: str, message: str
) -> None:
    copy = shutil.copytree(packed, tmp_path / "copy")
    model = from_disk(copy)
    with (copy / FILE).open("rb+") as stream:
        stream.seek(-1, 2)
        last = stream.read(1)[0]
        stream.seek(-1, 2)
        if harm == "damage":
            stream.write(bytes([last ^ 1]))
        else:
            stream.truncate()
    with pytest.raises(ModelError, match=rf"{FILE}.* {message}"):
        tandem.save(model, tmp_path / "again")
    assert list(tmp_path.iterdir()) == [copy]


def test_packing_loads_no_table(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[list[DiskEmbedding]] = []
    finish = FileSink.finish

    def note(sink: FileSink, model: Any) -> int:
        kept.append(tables_on_disk(model))
        return finish(sink, model)

    monkeypatch.setattr(FileSink, "finish", note)
    tandem.pack(folders["qwen4_exp"] / "plain", tmp_path / "packed", expert_dtype="int8")
    assert [len(table.place.parts) for table in kept[0]] == [4, 4]


def test_packing_asks_the_disk_for_room_for_tables(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = folders["qwen4_exp"] / "plain"
    sizes = sizes_of(plain)
    free = sizes.experts_bytes + sizes.dense_bytes["tables of rows"] - 1
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(CapacityError, match=r"packing writes .* of experts and tables of rows to"):
        tandem.pack(plain, tmp_path / "packed", expert_dtype="int8")


def test_tables_in_the_file_of_the_dense_parts_are_found_there(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = tandem.load(folders["gemma4"] / "packed")
    monkeypatch.setattr("tandem.hf.packed_writer.stored_tables", lambda model: {})
    older = tandem.save(right, tmp_path / "older")
    assert not (older / FILE).exists()
    model = from_disk(older)
    with torch.inference_mode():
        assert torch.equal(model(ids(20)).logits, right(ids(20)).logits)


@pytest.mark.parametrize(
    ("error", "message"), [(CUT, "ends before"), (errno.EIO, "a row cannot be read")]
)
def test_a_failed_read_is_a_sentence_and_the_next_request_is_right(
    packed: Path, error: int, message: str
) -> None:
    in_memory, model = tandem.load(packed), from_disk(packed)
    with torch.inference_mode():
        native_of(model).fail(error, 3, 0.0)
        with pytest.raises(ModelError, match=message):
            model(ids(40))
        native_of(model).fail(0, 0, 0.0)
        assert torch.equal(model(ids(40)).logits, in_memory(ids(40)).logits)


def test_a_failed_read_in_a_step_fails_its_request_alone(packed: Path) -> None:
    model = from_disk(packed)
    generator, prompt = tandem.Generator(model), ids(9)[0].tolist()
    generator.generate(prompt, max_new_tokens=8)
    native_of(model).fail(errno.EIO, 2, 0.0)
    with pytest.raises(TandemError, match="Input/output error"):
        generator.generate(ids(5)[0].tolist(), max_new_tokens=20)
    native_of(model).fail(0, 0, 0.0)
    (found,) = generator.generate(prompt, max_new_tokens=20)
    (right,) = tandem.Generator(tandem.load(packed)).generate(prompt, max_new_tokens=20)
    assert found.token_ids == right.token_ids


def test_a_file_that_was_cut_is_a_sentence_and_one_that_was_deleted_is_read(
    packed: Path, tmp_path: Path
) -> None:
    copies = [Path(shutil.copytree(packed, tmp_path / name)) for name in ("cut", "deleted")]
    cut, deleted = map(from_disk, copies)
    with (copies[0] / FILE).open("rb+") as stream:
        stream.truncate(4096)
    (copies[1] / FILE).unlink()
    with torch.inference_mode():
        with pytest.raises(ModelError, match=r"ends before .* of a row"):
            cut(ids(60))
        assert torch.equal(deleted(ids(60)).logits, tandem.load(packed)(ids(60)).logits)


def test_what_memory_holds_is_counted_without_tables(packed: Path) -> None:
    sizes = sizes_of(packed)
    tables = sum(one.place.num_bytes for one in tables_on_disk(from_disk(packed)))
    whole = sizes.experts_bytes + sizes.total_dense_bytes
    assert sizes.within(whole, None, sizes.total_dense_bytes) is sizes
    assert sizes.within(whole - 1, sizes.experts_bytes - 1, None) is sizes
    less = sizes.within(whole - 1, None, None)
    assert sizes.within(whole, None, sizes.total_dense_bytes - 1) == less
    assert less.disk_table_bytes == tables
    assert less.total_dense_bytes == sizes.total_dense_bytes - tables


@pytest.mark.parametrize("form", ["plain", "packed"])
def test_a_plan_says_that_tables_stay_on_the_disk(
    folders: dict[str, Path], form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folders["qwen4_exp"] / form
    words = [str(folder), "--no-measure", "--expert-dtype", "int8", "--dense-dtype", "none"]
    line = "tables of rows, left on the disk"
    out, before = plan(capsys, *words)
    assert line not in out
    with memory_of(room_for_half_of_the_tables(folder)):
        out, after = plan(capsys, *words)
    assert line in out
    tables = after["disk_table_bytes"]
    assert tables == before["parts_bytes"]["tables of rows"]
    assert sum(after["parts_bytes"].values()) == sum(before["parts_bytes"].values()) - tables


@pytest.mark.slow
def test_a_table_of_50_gb_takes_little_memory(tmp_path: Path) -> None:
    try:
        command = [sys.executable, "-m", "tests.disk.large_table", str(tmp_path)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        found = json.loads(run.stdout.splitlines()[-1])
        assert found["table_bytes"] > 50e9
        assert found["file_bytes"] < 50e6
        assert found["peak_bytes"] < 2e9
        assert found["tokens"] == 20
    finally:  # sparse or not, it must not stay for the next tests
        shutil.rmtree(tmp_path)


def test_other_embeddings_are_no_tables(folders: dict[str, Path]) -> None:
    model = from_disk(folders["gemma4"] / "packed")
    assert [type(m) for m in model.modules() if isinstance(m, DiskEmbedding)] == [DiskEmbedding]
    assert not isinstance(model.get_input_embeddings(), DiskEmbedding)


def test_a_captured_step_reads_rows_between_its_segments(packed: Path) -> None:
    prompts, tokens = [[40, 41, 42], [50, 51]], [60, 71, 82, 93, 104]
    in_memory = cuda_pool(tandem.load(packed), prompts, 20, make_capture=TwinCapture)
    model = from_disk(packed)
    rows = cuda_pool(model, prompts, 20, make_capture=TwinCapture)
    expected, found = (logits_of(pool, 2, tokens) for pool in (in_memory, rows))
    assert rows.step.is_replaying, rows.step.why_not
    assert all(map(torch.equal, found, expected))
    assert rows.num_segments == in_memory.num_segments + len(tables_on_disk(model))


@in_dry_gpu
def test_device_cuda_reads_rows_between_graph_segments(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    packed = folders["qwen4_exp"] / "packed"
    expected = outputs_on_cpu(packed)
    with shadow_gpu(), quick_loads(), ExitStack() as stack:
        with memory_of(1), pytest.warns(UserWarning, match="of tables"):
            model = stack.enter_context(loaded(packed, tmp_path))
        assert_same(model_outputs(model, pool := gpu_pool(model, PROMPTS, len(TOKENS))), expected)
        assert pool.step.is_replaying, pool.step.why_not
        assert pool.num_segments == 1 + len(tables_on_disk(model)) == 3


def test_what_a_device_does_not_hold_stays_on_the_disk(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = folders["gemma4"] / "packed"
    dense_bytes = sizes_of(packed).total_dense_bytes
    monkeypatch.setattr("tandem.hf.quantizer.free_device_bytes", lambda device: dense_bytes - 1)
    with shadow_gpu(), quick_loads(), ExitStack() as stack:
        with pytest.warns(UserWarning, match="of tables"):
            model = stack.enter_context(loaded(packed, tmp_path))
        assert tables_on_disk(model)


def test_closing_ends_the_readers(packed: Path) -> None:
    def num_threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    model = from_disk(packed)
    rows, before = tables_on_disk(model)[0], num_threads()
    model.close()
    model.close()
    assert num_threads() <= before - 16
    with pytest.raises(ModelError, match="has been closed"):
        rows(ids(3))
