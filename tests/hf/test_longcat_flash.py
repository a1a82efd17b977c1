"""Tests of LongCat-Flash beyond those of all architectures: experts without weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tandem
from tandem.bench.routing_recording import recording
from tandem.core.errors import UnsupportedModelError
from tests.architecture_sizes import EXPERTS
from tests.architectures import build_tiny_model, experts_modules
from tests.inside import logits_of, relative_error, runtime_in
from tests.loading.checkpoints import (
    FORMATS,
    lose_tensors,
    write_decoded,
    write_plain,
    write_quantised,
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    build_tiny_model("longcat_flash").save_pretrained(tmp_path)
    return tmp_path


def test_released_checkpoints_have_no_matrices_for_them(checkpoint: Path) -> None:
    """Transformers writes such matrices, but nothing reads them."""
    expected = logits_of(tandem.load(checkpoint, dtype="float32"))
    for spare in range(EXPERTS, EXPERTS + 4):
        lose_tensors(checkpoint, f"model.layers.1.mlp.experts.{spare}.")
    assert torch.equal(logits_of(tandem.load(checkpoint, dtype="float32")), expected)


def test_codes_of_a_quantised_checkpoint_are_kept(tmp_path: Path) -> None:
    plain = write_plain(tmp_path / "plain", "longcat_flash", zero_expert_num=0)
    released = write_quantised(tmp_path / "fp8", plain, FORMATS["fp8"])
    decoded = tandem.load(write_decoded(tmp_path / "decoded", released), dtype="float32")
    model = tandem.load(released, dtype="float32")
    assert {layer.layout.format.name for layer in runtime_in(model).store} == {"fp8"}
    assert relative_error(logits_of(model), logits_of(decoded)) < 0.03


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
