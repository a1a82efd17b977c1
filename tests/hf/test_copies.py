"""Tests that a model is never saved, copied or counted without its experts silently."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from transformers import AutoModelForCausalLM

import tandem
from tandem.core.errors import ConfigError
from tests.inside import runtime_in

pytestmark = pytest.mark.seam


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")


@pytest.fixture(scope="module", params=["cpu", "emulated"])
def model(checkpoint: Path, request: pytest.FixtureRequest) -> Any:
    more: dict[str, Any] = (
        {"gpu_memory": "300kB", "profile": "laptop-8gb"} if request.param != "cpu" else {}
    )
    return tandem.load(checkpoint, dtype="float32", device=request.param, **more)


def test_a_state_dict_shows_what_the_model_has(model: Any, plain: Any) -> None:
    expected = plain.state_dict()
    found = model.state_dict()
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }
    dense = next(name for name in found if "q_proj" in name)
    assert torch.equal(found[dense], expected[dense])


WRITERS: dict[str, Callable[[Any, Path], Any]] = {
    "save_model": lambda model, path: save_model(model, str(path)),
    "save_file": lambda model, path: save_file(model.state_dict(), path),
    "torch.save": lambda model, path: torch.save(model, path),
    "torch.save of a part": lambda model, path: torch.save(model.model, path),
    "torch.save of a state dict": lambda model, path: torch.save(model.state_dict(), path),
    "state dict of a part": lambda model, path: torch.save(model.model.state_dict(), path),
    "pickle": lambda model, path: pickle.dump(model, io.BytesIO()),
    "deepcopy": lambda model, path: copy.deepcopy(model),
    "deepcopy of a part": lambda model, path: copy.deepcopy(model.model),
    "deepcopy around": lambda model, path: copy.deepcopy(torch.nn.Sequential(model)),
    "clones": lambda model, path: {n: t.clone() for n, t in model.state_dict().items()},
    "on the CPU": lambda model, path: {n: t.cpu().numpy() for n, t in model.state_dict().items()},
    "save_pretrained": lambda model, path: model.save_pretrained(path),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_nobody_writes_or_copies_a_model_without_its_experts(
    model: Any, tmp_path: Path, writer: str
) -> None:
    with pytest.raises(ConfigError, match=r"tandem\.save\(model, directory\)"):
        WRITERS[writer](model, tmp_path / "written")


@pytest.mark.parametrize("options", [{}, {"expert_dtype": "int4", "dense_dtype": "int8"}])
def test_parameters_that_tandem_keeps_are_counted(
    checkpoint: Path, plain: Any, options: dict[str, Any]
) -> None:
    model = tandem.load(checkpoint, dtype="float32", **options)
    # Packed layers have their own copy of weights that the embeddings may share.
    assert model.num_parameters() == plain.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == plain.num_parameters(
        exclude_embeddings=True
    )
    found, whole = model.get_memory_footprint(), plain.get_memory_footprint()
    if not options:
        assert found == whole
    else:
        assert runtime_in(model).store.num_bytes < found < whole / 2


def test_only_what_has_gradients_is_counted_as_trainable(model: Any) -> None:
    dense = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert model.num_parameters(only_trainable=True) == dense


META: dict[str, Callable[[Any], Any]] = {
    "a name": lambda model: model.to("meta"),
    "a device": lambda model: model.to(torch.device("meta"), torch.bfloat16),
    "by keyword": lambda model: model.to(device="meta", dtype=torch.bfloat16),
    "as a tensor": lambda model: model.to(torch.empty(0, device="meta")),
}


@pytest.mark.parametrize("move", META)
def test_a_model_is_not_moved_to_where_nothing_has_values(model: Any, move: str) -> None:
    before = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    with pytest.raises(ConfigError, match=r"moved to the device 'meta'.*model\.close\(\)"):
        META[move](model)
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == before
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def test_other_moves_are_torchs_own(model: Any) -> None:
    assert model.to("cpu") is model.to(device=torch.device("cpu")) is model.to(torch.float32)
    with pytest.raises(RuntimeError, match="nowhere"):
        model.to("nowhere")
