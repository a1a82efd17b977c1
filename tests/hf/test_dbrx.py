"""Tests of DBRX beyond those of all architectures: damaged tensors, and its nested config."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tandem
from tandem.core.errors import ModelError
from tandem.forecast.sizes import model_sizes
from tandem.hf.checkpoint import open_model
from tandem.hf.config import OffloadConfig
from tests.architecture_sizes import TOP_K
from tests.architectures import build_tiny_model

NAME = "transformer.blocks.1.ffn.experts.mlp.w2"


def test_forecasts_know_how_many_experts_a_token_has(tmp_path: Path) -> None:
    """DBRX's config has it in a nested config."""
    build_tiny_model("dbrx", values={"n_layers": 1}).save_pretrained(tmp_path)
    sizes = model_sizes(open_model(tmp_path), OffloadConfig())
    assert sizes.top_k == TOP_K


@pytest.mark.parametrize("expert_dtype", ["auto", "int8"])
def test_rows_that_are_missing_or_not_finite_are_an_error(
    tmp_path: Path, expert_dtype: str
) -> None:
    build_tiny_model("dbrx", values={"n_layers": 2}).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    options: Any = {"dtype": "float32", "expert_dtype": expert_dtype}
    save_file(whole | {NAME: whole[NAME][:-3].clone()}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"mlp\.down_proj has shape .* but config\.json asks for"):
        tandem.load(tmp_path, **options)
    damaged = whole[NAME].clone()
    damaged[40, 3] = torch.nan
    save_file(whole | {NAME: damaged}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"weights that are NaN or infinite"):
        tandem.load(tmp_path, **options)
