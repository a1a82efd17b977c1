"""Tests of the dense parts' place: read on the host for any device, and moved at the end."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import tandem
from tandem.checkpoint import stored_experts
from tandem.core.errors import ConfigError
from tandem.devices import Cuda
from tandem.devices.cuda.embedding import HostEmbedding
from tandem.hf import assembly, conversion
from tandem.hf.config import OffloadConfig
from tandem.hf.dense_place import dense_device, keep_embeddings_on_host, move_dense_parts
from tandem.hf.experts import expert_functions
from tandem.hf.runtime import require_runtime
from tests.hf.tiny import save_tiny_checkpoint

GPU, META = torch.device("cuda", 0), torch.device("meta")
# Their checkpoints hold a layer's experts in one tensor, so Transformers' own code merges nothing.
FUSED = ["gpt_oss", "granitemoe", "qwen3_vl_moe", "gemma4", "mistral4"]


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, torch.device]]:
    """Allow a GPU to be requested; record the moves to it instead of making them."""
    found: list[tuple[Any, torch.device]] = []
    monkeypatch.setattr(Cuda, "require", lambda self: None)
    monkeypatch.setattr(assembly, "move_dense_parts", lambda *move: found.append(move))
    return found


@pytest.mark.parametrize("name", FUSED)
def test_experts_are_packed_from_host_memory_and_dense_parts_move_at_the_end(
    name: str, tmp_path: Path, moves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[torch.device, int]] = []

    def put_fused(layer: Any, tensor_name: str, fused: Any, **options: Any) -> None:
        seen.append((fused.device, len(moves)))
        stored_experts.put_fused(layer, tensor_name, fused, **options)

    monkeypatch.setattr(conversion, "put_fused", put_fused)
    directory = save_tiny_checkpoint(tmp_path / name, name)
    model = tandem.load(directory, device_map="cuda", expert_dtype="int8")
    assert set(seen) == {(torch.device("cpu"), 0)}
    assert [device for _, device in moves] == [GPU]
    for layer in require_runtime(model).store:
        layer.arrivals.require_complete()


@pytest.mark.parametrize("device_map", ["cuda", 0, {"": 0}, torch.device("cuda:0"), None])
def test_a_device_map_of_from_pretrained_goes_the_same_way(
    device_map: Any, checkpoint: Path, moves: Any
) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=tandem.OffloadConfig(), device_map=device_map
    )
    assert moves == ([] if device_map is None else [(model, GPU)])


def test_a_gpu_needs_no_accelerate(
    checkpoint: Path, tmp_path: Path, moves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.integrations.accelerate.is_accelerate_available", bool)
    model = tandem.load(checkpoint, device_map="cuda")
    packed = tandem.save(model, tmp_path / "packed")
    moves.clear()
    assert {device for _, device in [*moves, (tandem.load(packed, device_map=0), GPU)]} == {GPU}
    assert [device for _, device in moves] == [GPU, GPU]  # by the file's options, and by the user's


class Small(nn.Module):
    """A head that is tied to embeddings, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings, self.norm = nn.Embedding(8, 4), nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embeddings.weight
        self.norm.register_buffer("scale", torch.ones(4), persistent=False)
        self.norm.weight.requires_grad_(False)


def test_what_is_tied_stays_tied_where_it_moves() -> None:
    small = Small()
    move_dense_parts(small, META)
    assert {t.device for t in (*small.parameters(), *small.buffers())} == {META}
    assert small.head.weight is small.embeddings.weight
    assert small.head.weight.requires_grad
    assert not small.norm.weight.requires_grad
    assert "scale" not in small.state_dict()


def test_the_experts_placeholders_move_and_the_hosts_embeddings_stay(tmp_path: Path) -> None:
    """`model.device` is then the dense parts' device, whichever parameter comes first."""
    model = tandem.load(save_tiny_checkpoint(tmp_path / "tiny", "solar_open"))
    keep_embeddings_on_host(model, META)
    move_dense_parts(model, META)
    assert model.device == META
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, HostEmbedding)
    assert embeddings.weight.device.type == "cpu"


def test_a_norm_after_experts_goes_where_their_rows_are(tmp_path: Path) -> None:
    model = tandem.load(save_tiny_checkpoint(tmp_path / "tiny", "muse_spark"), dtype="float32")
    module, _ = require_runtime(model).bound[0]
    norm, rows = expert_functions(module).post_norm, torch.randn(3, 32)
    assert norm is not None
    assert norm(rows.to(META)).device == META
    assert torch.equal(norm(rows), module.post_expert_norm(rows))  # type: ignore[operator]


@pytest.mark.parametrize("device_map", ["meta", "disk", "gpu", -1, {"": "meta"}, 1.5])
def test_a_device_map_to_no_device_is_refused(device_map: object) -> None:
    with pytest.raises(ConfigError, match="which cannot hold the dense parts"):
        dense_device(OffloadConfig(), device_map)
