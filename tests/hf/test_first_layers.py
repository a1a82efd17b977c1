"""Checks load the first layers of a model alone: its config is cut whatever it lists by layer."""

import pytest
import torch
from transformers import AutoConfig

from tandem.bench.model_shapes import MODEL_SHAPES
from tandem.hf.experts import is_experts_module
from tandem.hf.load import empty_model, keep_first_layers


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_a_config_is_cut_to_its_first_layers(name: str) -> None:
    shape = MODEL_SHAPES[name]
    config = AutoConfig.for_model(shape.model_type, **shape.values)
    config.dtype = torch.bfloat16
    keep_first_layers(config, 3)
    assert config.num_hidden_layers == 3
    model = empty_model(config)
    assert len(model.get_decoder().layers) == 3
    assert any(is_experts_module(module) for module in model.modules())
