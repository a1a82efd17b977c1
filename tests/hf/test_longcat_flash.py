"""LongCat-Flash beside what all architectures are tested for: experts without weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tandem
from tandem.bench.routing_recording import recording
from tandem.core.errors import UnsupportedModelError
from tests.architectures import EXPERTS, build_tiny_model, experts_modules
from tests.inside import logits_of


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    build_tiny_model("longcat_flash").save_pretrained(tmp_path)
    return tmp_path


def test_released_checkpoints_have_no_matrices_for_them(checkpoint: Path) -> None:
    """Transformers writes some, which nothing reads."""
    expected = logits_of(tandem.load(checkpoint, dtype="float32"))
    file = checkpoint / "model.safetensors"
    spare = tuple(f".experts.{EXPERTS + i}." for i in range(4))
    tensors = load_file(file)
    kept = {n: t for n, t in tensors.items() if not any(part in n for part in spare)}
    assert len(kept) < len(tensors)
    save_file(kept, file, {"format": "pt"})
    assert torch.equal(logits_of(tandem.load(checkpoint, dtype="float32")), expected)


@pytest.mark.parametrize("expert_dtype", ["auto", "int8"])
def test_a_token_may_have_such_experts_alone(checkpoint: Path, expert_dtype: str) -> None:
    model = tandem.load(checkpoint, dtype="float32", expert_dtype=expert_dtype)
    experts: Any = experts_modules(model)[0]
    hidden, weights = torch.randn(2, 64), torch.tensor([[0.5, 0.25], [0.5, 0.25]])
    with torch.no_grad():
        out = experts(hidden, torch.tensor([[EXPERTS, EXPERTS + 3], [1, EXPERTS + 3]]), weights)
        one = experts(hidden, torch.tensor([[1, 2], [1, 2]]), torch.tensor([[0.5, 0.0]] * 2))
    torch.testing.assert_close(out[0], 0.75 * hidden[0])
    torch.testing.assert_close(out[1], one[1] + 0.25 * hidden[1])


def test_a_trace_is_refused(checkpoint: Path) -> None:
    model = tandem.load(checkpoint, dtype="float32")
    with (
        pytest.raises(UnsupportedModelError, match="experts without weights"),
        recording(model),
    ):
        pass
