"""Reads GGUF models with or without experts; blocks that a packed format holds keep their codes.

Gate and up of a layer's experts are separate tensors (in some files a single tensor), of shape
(num_experts, rows, cols), in blocks along the columns. `gguf_models` has each architecture's tensor
names and row orders.
"""

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tandem.checkpoint.config_sizes import counted_build
from tandem.checkpoint.config_values import require_possible_values
from tandem.checkpoint.sources.gguf_header import GgufHeader, read_header
from tandem.checkpoint.sources.gguf_models import ARCHITECTURES, Architecture, Recipe
from tandem.checkpoint.sources.gguf_models.architecture import Values
from tandem.checkpoint.sources.gguf_weight import GgufWeight, PlainTensor
from tandem.checkpoint.sources.source import Source, StoredWeight
from tandem.core.errors import ModelError, TandemError, UnsupportedModelError
from tandem.foreign_types import PreTrainedConfig, PreTrainedModel

_IN_LAYER = re.compile(r"(?:.*\.)?layers\.(?P<layer>\d+)\.(?P<name>.+)")


def read_gguf_header(file: Path) -> GgufHeader:
    """Read the metadata and tensor list of a GGUF model, from all its parts; no tensor is read.

    Raises `ModelError` for a damaged file, and `UnsupportedModelError` for an unknown architecture
    or a file that is not a whole model (mmproj, MTP).
    """
    header = read_header(file)
    architecture = header.architecture
    if architecture == "clip":
        raise UnsupportedModelError(
            f"{file} is not a model, but reads images for one (mmproj); give the .gguf file beside "
            "it, and Tandem reads its text model"
        )
    known = ARCHITECTURES.get(architecture)
    lacks_experts = header.expert_width is None and header.value("expert_count", 0) != 0
    if known is None or lacks_experts or not (known.may_be_dense or header.expert_width):
        what = architecture if known is None else f"{architecture} (no experts)"
        raise UnsupportedModelError(
            f"{file} is of architecture {what!r}; of GGUF Tandem reads {', '.join(ARCHITECTURES)}: "
            "use the model's safetensors instead"
        )
    _require_counts(header)
    if not any(name.startswith("blk.0.") for name in header.tensors):
        raise UnsupportedModelError(
            f"{file} is not a model, but drafts for one (MTP), as it has no first layer; give the "
            ".gguf file beside it, with --speculate mtp"
        )
    return header


def open_gguf(
    file: Path,
    model_of: Callable[[PreTrainedConfig], PreTrainedModel],
    *,
    adapt: Callable[[PreTrainedConfig], None] = lambda _: None,
) -> tuple[PreTrainedConfig, Source]:
    """Return the Transformers config of a GGUF file, and its weights.

    `model_of` must build the config's model on the meta device; `adapt` may change the config
    before that. Raises the errors of `read_gguf_header` and `config_of`, and `ModelError` for
    impossible values.
    """
    header = read_gguf_header(file)
    config = config_of(header)
    values = config.to_dict()
    require_possible_values(str(file), values)
    config.dtype = _dense_dtype(header)
    adapt(config)
    with counted_build(str(file), values, header.held):
        model = model_of(config)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    return config, gguf_source(header, shapes, config)


def config_of(header: GgufHeader) -> PreTrainedConfig:
    """Return the Transformers config of a GGUF file.

    Raises `ModelError` for damaged metadata, and `UnsupportedModelError` if the installed
    Transformers cannot make the config.
    """
    try:
        return ARCHITECTURES[header.architecture].config(header)
    except TandemError:
        raise
    except (TypeError, ArithmeticError, AttributeError, IndexError) as error:
        raise ModelError(
            f"{header.file} has metadata that make no config of a {header.architecture!r} "
            f"({error}); download it again"
        ) from error
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(
            f"Transformers cannot make a config of {header.file}, of architecture "
            f"{header.architecture!r} ({error}); if it is too old: pip install --upgrade "
            "transformers"
        ) from error


def _require_counts(header: GgufHeader) -> None:
    """Raise `ModelError` if counts in the metadata contradict the tensors."""
    numbers = (name.split(".")[1] for name in header.tensors if name.startswith("blk."))
    layers = 1 + max((int(number) for number in numbers if number.isdecimal()), default=0)
    if layers > len(header.tensors):
        raise ModelError(
            f"{header.file} names a tensor of layer {layers - 1}, and has {len(header.tensors)} "
            "tensors; download it again"
        )
    embedding = header.tensors.get("token_embd.weight")
    if (predicting := header.value("nextn_predict_layers", 0)) and isinstance(predicting, int):
        layers = max(layers, int(header.value("block_count", 0)) - predicting)
    found = {
        "block_count": layers,
        "embedding_length": None if embedding is None else embedding.shape[0],
        "expert_count": header.experts and header.experts.shape[-1],
    }
    for key, count in found.items():
        if count is not None and header.value(key) != count:
            raise ModelError(
                f"{header.file} says that its {key} is {header.value(key)}, and its tensors have "
                f"{count}; download it again"
            )


def _dense_dtype(header: GgufHeader) -> torch.dtype:
    """Return the dtype of dense parts: fp16 if matrices are fp16, or fp16 and fp32; else bf16."""
    kinds = {t.tensor_type.name for t in header.tensors.values() if len(t.shape) > 1} - {"I32"}
    return torch.float16 if "F16" in kinds and kinds <= {"F16", "F32"} else torch.bfloat16


def gguf_source(
    header: GgufHeader, shapes: Mapping[str, torch.Size], config: PreTrainedConfig
) -> Source:
    """Return the file's tensors under the names of the parameters of `config`'s model.

    `shapes` maps these names to the parameters' shapes.
    """
    architecture = ARCHITECTURES[header.architecture]
    recipes = {
        name: recipe
        for name in shapes
        if (recipe := find_recipe(architecture, name, header.tensors)) is not None
    }
    taken = {tensor for recipe in recipes.values() for tensor in recipe.tensors}
    weights: dict[str, StoredWeight] = {}
    plain: dict[str, object] = {}
    for name, recipe in recipes.items():
        factors = [_factor_name(tensor) for tensor in recipe.tensors]
        found = [None if factor in taken else header.tensors.get(factor) for factor in factors]
        weight = GgufWeight(
            name=name,
            tensors=tuple(header.tensors[tensor] for tensor in recipe.tensors),
            is_interleaved=architecture.is_interleaved,
            is_transposed=architecture.is_transposed,
            row_order=recipe.rows and recipe.rows(config),
            column_order=recipe.columns and recipe.columns(config),
            factors=tuple(found) if any(factor is not None for factor in found) else (),
        )
        if recipe.values is not None:
            made = partial(_made, recipe.values, config)
            plain[name] = PlainTensor(weight, shapes[name], made)
        elif weight.is_plain:
            plain[name] = PlainTensor(weight, shapes[name])
        else:
            weights[name] = weight
    plain_experts = {
        name: value.expert_format
        for name, value in plain.items()
        if isinstance(value, PlainTensor) and value.are_experts
    }
    return Source("gguf", weights, plain, plain_experts=plain_experts)


def find_recipe(
    architecture: Architecture, parameter: str, tensors: Container[str]
) -> Recipe | None:
    """Return the recipe for a model's parameter; None if a file with these tensors has none."""
    found = _IN_LAYER.fullmatch(parameter)
    before = f"blk.{found['layer']}." if found else ""
    own = found["name"] if found else parameter
    recipe = architecture.recipe(own, lambda name: before + name in tensors)
    if recipe is None:
        return None
    return replace(recipe, tensors=tuple(before + name for name in recipe.tensors))


def _made(values: Values, config: PreTrainedConfig, parts: list[Tensor]) -> Tensor:
    return values(parts, config)


def _factor_name(name: str) -> str:
    """Return the name of the tensor with the NVFP4 factor of a weight; empty for other tensors."""
    return f"{name.removesuffix('.weight')}.scale" if name.endswith(".weight") else ""
