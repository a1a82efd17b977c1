"""Tests of shallow copies: they share a model's tensors, follow changes, and change nothing."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma3Config

from tandem.decode.substitutions import shallow_copy
from tandem.decode.substitutions.shallow_copy import ShallowCopy
from tandem.decode.substitutions.substitution import Substitution
from tandem.hf.compat import config_to_step
from tests.architectures import build_tiny_model

IDS = torch.tensor([[5, 6, 7]])


@pytest.fixture
def model() -> Any:
    return build_tiny_model("qwen3_moe")


@pytest.mark.seam
def test_tensors_are_shared_and_configs_are_not(model: Any) -> None:
    before = dict(vars(model.config))
    copy = ShallowCopy(model).model
    pairs = zip(model.state_dict().values(), copy.state_dict().values(), strict=True)
    assert all(own.data_ptr() == other.data_ptr() for own, other in pairs)
    assert type(copy) is type(model)
    assert copy.config is not model.config
    assert vars(model.config) == before
    assert copy.model.layers[0].self_attn.config is copy.config
    assert copy.model.layers[0].self_attn.q_proj is model.model.layers[0].self_attn.q_proj


@pytest.mark.seam
def test_configs_within_configs_are_copied_too() -> None:
    copies: dict[int, Any] = {}
    config = Gemma3Config()
    copy: Any = config_to_step(config, "tandem", copies)
    assert copy.text_config is copies[id(config.text_config)]
    assert copy.text_config._attn_implementation == copy._attn_implementation == "tandem"
    assert config.text_config._attn_implementation != "tandem"


def test_a_module_that_is_replaced_is_replaced_in_the_copy(model: Any) -> None:
    shallow = ShallowCopy(model)
    attention = model.model.layers[1].self_attn
    attention.q_proj = nn.Linear(4, 4)
    assert shallow.model.model.layers[1].self_attn.q_proj is attention.q_proj


def test_hooks_of_the_model_are_called(model: Any) -> None:
    shallow, called = ShallowCopy(model), []
    model.model.layers[0].register_forward_pre_hook(lambda module, args: called.append(module))
    with pytest.raises(Exception, match=r"tandem\.Generator"):
        shallow.model(IDS)
    assert called == [shallow.model.model.layers[0]]


def test_flags_that_capture_outputs_leave_no_hooks_behind(model: Any) -> None:
    model.config.output_router_logits = True
    copy = ShallowCopy(model).model
    assert copy.config.output_router_logits is False
    assert model.config.output_router_logits is True


def test_a_forward_that_is_bound_to_the_model_is_not_the_copys(model: Any) -> None:
    model.forward = model.forward  # as torch.compile and accelerate assign it
    assert ShallowCopy(model).model.forward.__self__ is not model


def test_what_is_substituted_is_the_copys_alone(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = model.model.norm
    twice = Substitution(lambda module: module is norm, lambda self, x: x * 2 if x.any() else None)
    monkeypatch.setattr(shallow_copy, "METHODS", [twice])
    copy = ShallowCopy(model).model
    x = torch.ones(1, norm.weight.shape[0])
    assert torch.equal(copy.model.norm(x), 2 * x)
    assert torch.equal(copy.model.norm(x * 0), norm(x * 0))  # None: the model's own function
    assert torch.equal(norm(x), type(norm).forward(norm, x))
