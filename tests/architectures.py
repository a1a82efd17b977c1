"""Tiny random models of every architecture of the installed Transformers with fused experts.

No architecture is listed here. They are found in Transformers and among Tandem's adapters, and one
table of small sizes (SIZES) replaces the values in each default configuration.
"""

import functools
import importlib
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from _pytest.mark import ParameterSet
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput

from tandem.hf.adapters import ADAPTERS, adapter_of
from tandem.hf.compat import cache_argument
from tests.architecture_sizes import (
    EXCEPTIONS,
    FIRST_PLAIN_TOKEN,
    MAX_LAYERS,
    PROMPT_LENGTH,
    SIZES,
    VOCABULARY,
)

NEWEST = (5, 23)
"""The Transformers version on which the recorded steps were written."""
IS_OLDER = tuple(map(int, transformers.__version__.split(".")[:2])) < NEWEST

# One of each kind of attention, state, router, expert and residual; `make test-slow` tries all
# that `by_kind` leaves out.
KINDS = {
    "aria", "dbrx", "deepseek_v3", "deepseek_v4", "diffusion_gemma", "ernie4_5_vl_moe", "gemma4",
    "glm5_next", "gpt_oss", "granitemoehybrid", "hy_v4", "inkling", "jamba", "kimi_linear",
    "lfm2_moe", "llama4", "longcat_flash", "minimax", "minimax_m3_vl", "mixtral", "muse_spark",
    "nemotron_h", "openai_privacy_filter", "phimoe", "qwen3_next", "qwen3_vl_moe", "qwen4_exp",
    "step3p7", "zaya",
}  # fmt: skip
LAYER_GAIN = 0.7
ROUTER_GAIN = 1.5


@functools.cache
def architectures() -> list[str]:
    """Return the names of the model folders of Transformers whose experts Tandem computes."""
    models = Path(transformers.__file__).parent / "models"
    sources = {
        path.parent.name: path.read_text(encoding="utf-8")
        for path in sorted(models.glob("*/modeling_*.py"))
    }
    on_it = {name for name, text in sources.items() if "@use_experts_implementation" in text}
    return sorted(on_it | {name for name in adapted() if name in sources})


def adapted() -> set[str]:
    """Return the names of the model folders whose experts use the interface through an adapter."""
    return {name.partition(".")[0] for name in ADAPTERS}


def experts_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose forward goes through the experts interface."""
    marks = ("has_gate", "has_bias", "is_transposed")
    return [module for module in model.modules() if all(hasattr(module, mark) for mark in marks)]


def experts_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that compute experts: experts modules, or an adapter's replacements."""
    blocks = [
        module
        for module in model.modules()
        if isinstance(adapter_of(type(module)), type) or type(module) in ADAPTERS.values()
    ]
    return blocks or experts_modules(model)


def build_tiny_dense_model(
    name: str, *, class_name: str = "", values: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """Build a random model of an architecture without experts, as `build_tiny_model` does."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        of_name = (kind for kind in _model_classes(name) if class_name in ("", kind.__name__))
        model_class = next(of_name)
        model = model_class(_tiny_config(model_class, values or {}))
        _draw_weights(model)
        return model.eval()


def build_tiny_model(
    name: str, seed: int = 0, *, class_name: str = "", values: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """Build a random fp32 model of architecture `name` whose experts influence the output; eval
    mode.

    `class_name` selects another class than the usual one; `values` override config values.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for model_class in _model_classes(name):
            if class_name not in ("", model_class.__name__):
                continue
            model = model_class(_tiny_config(model_class, values or {}))
            if experts_blocks(model):
                _draw_weights(model)
                model.train(False)
                return model
    raise LookupError(f"no model class of {name} holds experts that use the interface")


def takes_cache(model: PreTrainedModel) -> bool:
    """Tell whether the model decodes with a key/value cache; encoders do not."""
    return model.can_generate() or "decoder_input_ids" in _forward_arguments(model)


def tiny_inputs(model: PreTrainedModel) -> dict[str, Any]:
    """Return a prompt of plain text tokens: two sequences of seven."""
    inputs: dict[str, Any] = {"input_ids": _plain_tokens(PROMPT_LENGTH)}
    if "decoder_input_ids" in _forward_arguments(model):  # diffusion draws its canvas at random
        inputs["decoder_input_ids"] = _plain_tokens(SIZES["canvas_length"])
    if takes_cache(model):
        inputs["use_cache"] = True
    return inputs


def next_inputs(model: PreTrainedModel, outputs: ModelOutput) -> dict[str, Any]:
    """Return the inputs of the step after a prompt: one token or one canvas, and the cache."""
    name = cache_argument(model)
    step: dict[str, Any] = {name: outputs[name], "use_cache": True}
    if "decoder_input_ids" in _forward_arguments(model):
        return {"decoder_input_ids": _plain_tokens(SIZES["canvas_length"] + 1)[:, 1:], **step}
    return {"input_ids": _plain_tokens(PROMPT_LENGTH + 1)[:, -1:], **step}


def result_of(outputs: ModelOutput) -> Tensor:
    """Return the tensor that tests compare: logits, or hidden states of a model without a head."""
    result: Tensor = outputs["logits" if "logits" in outputs else "last_hidden_state"]
    return result


def _forward_arguments(model: PreTrainedModel) -> Iterable[str]:
    return inspect.signature(model.forward).parameters


def _plain_tokens(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(FIRST_PLAIN_TOKEN, VOCABULARY, (2, length), generator=generator)


def _model_classes(name: str) -> list[type[PreTrainedModel]]:
    """List the architecture's model classes, the most useful kind of head first."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    heads = ("ForCausalLM", "ForConditionalGeneration", "For", "")
    found = [value for value in vars(module).values() if _is_model_class(value, module.__name__)]
    by_head = [cls for head in heads for cls in found if head in cls.__name__]
    return list(dict.fromkeys(by_head))


def by_kind(names: Iterable[str]) -> list[ParameterSet]:
    """Return a test's architectures; those similar to another one are left to `test-slow`."""
    slow = pytest.mark.slow
    return [pytest.param(name, marks=() if name in KINDS else slow) for name in sorted(names)]


def _is_model_class(value: object, module_name: str) -> bool:
    return (
        isinstance(value, type)
        and issubclass(value, PreTrainedModel)
        and value.__module__ == module_name
        and "PreTrainedModel" not in value.__name__
    )


def _tiny_config(model_class: type[PreTrainedModel], more: Mapping[str, Any]) -> PreTrainedConfig:
    config_class = model_class.config_class
    assert config_class is not None
    tiny = _tiny_values(config_class())
    parts = {
        name: tiny[name] | value
        for name, value in more.items()
        if name.endswith("_config") and name in tiny  # of a model with a tower
    }
    return config_class(**tiny | dict(more) | parts)


def _tiny_values(default: PreTrainedConfig) -> dict[str, Any]:
    """Replace the sizes in a default configuration, and in nested ones, by those of SIZES."""
    values: dict[str, Any] = {}
    stored = vars(default)  # getattr refuses keys that vary by layer
    layers = _layers_to_keep(default)
    for field in fields(default):
        value: Any = stored.get(_stored_name(default, field.name))
        if isinstance(value, PreTrainedConfig):
            values[field.name] = {**_tiny_values(value), "model_type": value.model_type}
        elif field.name == _stored_name(default, "num_hidden_layers"):
            values[field.name] = len(layers)
        elif field.name in SIZES:
            values[field.name] = _like(value, SIZES[field.name], layers)
        elif _is_per_layer(default, value):
            values[field.name] = [value[layer] for layer in layers]
    for prefix in ("num", "swa_num"):
        values |= _key_value_heads(stored, values, prefix)
    return values | EXCEPTIONS.get(default.model_type, {})


def _stored_name(config: PreTrainedConfig, key: str) -> str:
    return config.attribute_map.get(key, key)


def _like(default: object, size: Any, layers: list[int]) -> Any:
    """Repeat a size where the default is a list: one number per layer or per part."""
    if not isinstance(default, list | tuple):
        return size
    return [size] * min(len(default), max(len(layers), 1))


def _key_value_heads(stored: dict[str, Any], values: dict[str, Any], prefix: str) -> dict[str, int]:
    """Return the number of key/value heads: all, half or one of the query heads."""
    queries, keys = f"{prefix}_attention_heads", f"{prefix}_key_value_heads"
    if stored.get(keys) is None or queries not in stored:
        return {}
    if stored[keys] == stored[queries]:
        return {keys: values[queries]}
    return {keys: min(stored[keys], values[queries] // 2)}


def _is_per_layer(config: PreTrainedConfig, value: object) -> bool:
    layers = getattr(config, "num_hidden_layers", None)
    return isinstance(value, list | tuple) and len(value) == layers


def _layers_to_keep(config: PreTrainedConfig) -> list[int]:
    """Choose up to MAX_LAYERS layers of a default configuration: one of each kind, then the last
    ones.

    Layers without experts come first, so the last layers have experts.
    """
    n_layers = getattr(config, "num_hidden_layers", None) or 0
    lists = [value for value in vars(config).values() if _is_per_layer(config, value)]
    kinds = [repr([values[layer] for values in lists]) for layer in range(n_layers)]
    first_of_kind = [layer for layer in range(n_layers) if kinds.index(kinds[layer]) == layer]
    rest = [layer for layer in reversed(range(n_layers)) if layer not in first_of_kind]
    return sorted((first_of_kind + rest)[:MAX_LAYERS])


def _draw_weights(model: PreTrainedModel) -> None:
    """Draw weights such that experts influence the output and rounding errors do not grow.

    The embedding is larger than what each layer adds to it, as in trained models.
    """
    head = model.get_output_embeddings()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn_like(tensor)
            if tensor.dim() < 2 or "bias" in name:  # norms and the like need what they start with
                tensor.add_(0.1 * noise)
            elif "embed" in name and (head is None or tensor is not head.weight):
                tensor.copy_(noise)
            else:
                is_router = ".gate." in name or "router" in name
                gain = ROUTER_GAIN if is_router else LAYER_GAIN
                tensor.copy_(gain / math.sqrt(tensor.shape[-1]) * noise)
        for name, buffer in _stored_buffers(model):
            if "tid2eid" in name:  # DeepSeek-V4's table from token to experts
                scores = torch.rand(len(buffer), model.config.n_routed_experts)
                buffer.copy_(scores.argsort(-1)[:, : buffer.shape[-1]])
            elif "bias" in name:  # of routers; loading ZAYA resets what does not start at zero
                buffer.add_(0.03 * torch.randn_like(buffer) * (buffer == 0))


def _stored_buffers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    stored = model.state_dict().keys()
    return (named for named in model.named_buffers() if named[0] in stored)
