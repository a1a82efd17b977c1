"""Tests that packed checkpoints load as they were saved, and only with Tandem."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tandem
from tandem.experts.store.packed_layer import PackedLayer
from tandem.hf.dense import packed_layers
from tests.architectures import tiny_inputs
from tests.hf.tiny import save_tiny_checkpoint
from tests.inside import logits_of, runtime_in
from tests.programs import TORCH_IMPORTS, python

pytestmark = pytest.mark.seam


@pytest.fixture(scope="module")
def packed(checkpoint: Path) -> Path:
    directory = checkpoint.with_name("packed")
    return tandem.save(tandem.load(checkpoint, expert_dtype="bf16"), directory)


def test_from_pretrained_with_a_config_equals_load(checkpoint: Path) -> None:
    config = tandem.OffloadConfig(expert_dtype="bf16")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=config)
    torch.testing.assert_close(
        logits_of(model), logits_of(tandem.load(checkpoint, expert_dtype="bf16")), rtol=0, atol=0
    )


def test_plain_from_pretrained_opens_a_packed_checkpoint(checkpoint: Path, packed: Path) -> None:
    expected = logits_of(tandem.load(checkpoint, expert_dtype="bf16"))
    model = AutoModelForCausalLM.from_pretrained(packed)
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=0)
    layer = runtime_in(model).executor.store[0]
    assert isinstance(layer, PackedLayer)
    assert layer.layout.format.name == "bf16"


def test_generate_of_transformers_works(packed: Path) -> None:
    model = tandem.load(packed)
    ids = tiny_inputs(model)["input_ids"]
    generated = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert generated.shape[1] > ids.shape[1]


def test_a_packed_checkpoint_is_saved_again_unchanged(packed: Path, tmp_path: Path) -> None:
    again = tandem.save(tandem.load(packed), tmp_path / "again")
    for file in packed.glob("*.safetensors"):
        assert (again / file.name).read_bytes() == file.read_bytes()


def test_without_tandem_a_packed_checkpoint_is_an_error(packed: Path) -> None:
    code = (
        f"import transformers; transformers.AutoModelForCausalLM.from_pretrained({str(packed)!r})"
    )
    done = python(code, imports=TORCH_IMPORTS)
    assert done.returncode != 0
    assert "model.safetensors" in done.stderr


def test_a_packed_checkpoint_keeps_its_dtype(packed: Path) -> None:
    with pytest.raises(tandem.TandemError, match=r"packed with expert_dtype 'bf16'"):
        tandem.load(packed, expert_dtype="int4")


def test_threads_and_instruction_set_are_heard_for_packed_checkpoints(
    checkpoint: Path, tmp_path: Path
) -> None:
    int8 = tandem.save(tandem.load(checkpoint, expert_dtype="int8"), tmp_path / "int8")
    with pytest.raises(tandem.TandemError, match="'avx513' is not on this processor"):
        logits_of(tandem.load(int8, isa="avx513"))
    best, portable = tandem.load(int8, threads=2), tandem.load(int8, threads=1, isa="portable")
    torch.testing.assert_close(logits_of(portable), logits_of(best), rtol=1e-3, atol=1e-3)


def test_save_pretrained_names_tandem_save(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(tandem.TandemError, match=r"tandem\.save"):
        tandem.load(packed).save_pretrained(tmp_path)


def test_save_into_a_directory_in_use_is_refused(packed: Path) -> None:
    with pytest.raises(tandem.TandemError, match="not an empty directory"):
        tandem.save(tandem.load(packed), packed)


def test_save_that_fails_leaves_nothing(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(tandem.TandemError, match="No space left on device"):
        tandem.save(tandem.load(packed), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["gemma4", "hunyuan_v1_moe"])
def test_a_directory_with_packed_routers_loads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions wrote such directories: the files decide what is packed."""
    checkpoint = save_tiny_checkpoint(tmp_path / "plain", name)
    options: dict[str, Any] = {"dtype": "float32", "threads": 1}
    with monkeypatch.context() as patch:
        patch.setattr("tandem.hf.dense.router_layers", lambda model: set())
        before = tandem.load(checkpoint, dense_dtype="int8-g32", **options)
        directory = tandem.save(before, tmp_path / "packed")
    assert not any(map(is_of_a_router, dict(packed_layers(tandem.load(checkpoint, **options)))))
    by_itself: Any = AutoModelForCausalLM.from_pretrained(directory)
    for again in (tandem.load(directory, threads=1), by_itself):
        assert any(map(is_of_a_router, dict(packed_layers(again))))
        assert torch.equal(logits_of(again), logits_of(before))


def is_of_a_router(path: str) -> bool:
    return "router" in path or ".gate." in path
