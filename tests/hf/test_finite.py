"""Tests that NaN is never silent: it is found at load, and in a step with its first layer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tandem
from tandem.cli.main import main
from tandem.core.errors import ExecutionError, ModelError
from tandem.decode.finite_logits import require_finite_logits
from tests.decode.twin_capture import TwinCapture
from tests.decode.whole_pool import cuda_pool
from tests.hf.tiny import save_tiny_checkpoint

IDS = [20, 21, 22, 23]


def spoil(checkpoint: Path, part: str, value: float = float("nan")) -> str:
    """Set a value in the first tensor whose name contains `part`; return its name."""
    for shard in sorted(checkpoint.glob("model*.safetensors")):
        tensors = load_file(shard)
        for name, tensor in tensors.items():
            if part in name:
                tensor.view(-1)[5] = value
                save_file(tensors, shard, metadata={"format": "pt"})
                return name
    raise AssertionError(f"no tensor is named {part}")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_tiny_checkpoint(tmp_path / "tiny")


@pytest.mark.seam
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["layers.1.self_attn.v_proj", "norm", "embed_tokens"])
def test_a_dense_weight_that_is_not_finite_is_named(
    checkpoint: Path, part: str, value: float
) -> None:
    name = spoil(checkpoint, part, value)
    with pytest.raises(ModelError, match=rf"weight {name} holds NaN or infinity.*download it"):
        tandem.load(checkpoint)


@pytest.mark.parametrize("expert_dtype", ["float32", "bfloat16", "int4"])
def test_an_expert_that_is_not_finite_is_named(checkpoint: Path, expert_dtype: str) -> None:
    spoil(checkpoint, "layers.1.block_sparse_moe.experts.3.w2")
    with pytest.raises(ModelError, match=r"layers\.1\..*(NaN or infinite).*damaged"):
        tandem.load(checkpoint, dtype="float32", expert_dtype=expert_dtype)


@pytest.mark.parametrize("command", ["run", "pack", "doctor"])
def test_commands_say_it_in_a_sentence(
    checkpoint: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = spoil(checkpoint, "layers.0.self_attn.q_proj")
    more = {"run": ["-p", "hello"], "pack": ["-o", str(tmp_path / "packed")], "doctor": []}
    assert main([command, str(checkpoint), *more[command]]) == (1 if command == "doctor" else 2)
    shown = capsys.readouterr()
    output = shown.out if command == "doctor" else shown.err  # its table
    assert f"the weight {name} holds NaN" in output


def break_layer(model: Any, number: int) -> None:
    """Make a layer's attention overflow from now on."""
    with torch.no_grad():
        model.model.layers[number].self_attn.o_proj.weight.fill_(float("nan"))


def by_rows(model: Any) -> Callable[[], object]:
    generator = tandem.Generator(model)
    generator.generate(IDS, max_new_tokens=12, temperature=0)  # a step is recorded
    return lambda: generator.generate([*IDS, 30], max_new_tokens=12, temperature=0)


def padded(model: Any) -> Callable[[], object]:
    generator = tandem.Generator(model)
    generator.generate(IDS, max_new_tokens=2)
    generator.why_padded = "a test"
    return lambda: generator.generate(IDS, max_new_tokens=2)


def pooled(model: Any) -> Callable[[], object]:
    pool = tandem.Generator(model).slot_pool(2)
    return lambda: pool.prefill({1: IDS})


def on_a_gpu(model: Any) -> Callable[[], object]:
    """Return a captured step on a GPU's twin, and a prompt that fails."""
    pool = cuda_pool(model, [IDS, [30, 31]], 20, make_capture=TwinCapture)
    pool.prefill()
    for token in range(40, 48):
        pool.decode([token] * 2)
    assert pool.step.is_replaying, pool.step.why_not

    def step() -> object:
        return pool.decode([60, 61]) if all(map(pool.pool.held, range(2))) else pool.prefill()

    return step


def prompts_on_a_gpu(model: Any) -> Callable[[], object]:
    return cuda_pool(model, [IDS, [30, 31]], 20).prefill


@pytest.mark.parametrize("ways", [by_rows, padded, pooled, on_a_gpu, prompts_on_a_gpu])
def test_a_step_that_is_not_finite_names_its_first_layer(
    checkpoint: Path, ways: Callable[[Any], Callable[[], object]]
) -> None:
    model = tandem.load(checkpoint, dtype="float32")
    step = ways(model)
    weight = model.model.layers[1].self_attn.o_proj.weight.detach().clone()
    break_layer(model, 1)
    with pytest.raises(ExecutionError, match=r"first in model\.layers\.1\.self_attn\.o_proj;"):
        step()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.copy_(weight)
    step()  # no cache keeps any of it


def test_tokens_that_a_model_forbids_are_no_error() -> None:
    logits = torch.zeros(2, 8)
    logits[0, 3:] = -torch.inf
    require_finite_logits(None, logits, lambda row: [])
