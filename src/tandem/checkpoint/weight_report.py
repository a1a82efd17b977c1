"""Checks that loaded weights match config.json, by Transformers' report, and are finite."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import torch
from torch import nn

from tandem.checkpoint.config_values import value_of
from tandem.checkpoint.sources.source import StoredWeight
from tandem.core.errors import ModelError
from tandem.experts.store.arrivals import is_finite
from tandem.foreign_types import PreTrainedModel

_LAYER = re.compile(r"(.*?\blayers)\.(\d+)\.")


class LoadReport(TypedDict):
    """Transformers' report of the weights that it loaded."""

    missing_keys: set[str]
    unexpected_keys: set[str]
    mismatched_keys: set[tuple[str, Sequence[int], Sequence[int]]]


def require_own_weights(
    path: Path, model: PreTrainedModel, report: LoadReport, *, is_whole: bool
) -> None:
    """Raise `ModelError` for a missing weight, a wrong shape, or a weight of a surplus layer.

    Surplus layers are only checked if `is_whole`: all layers of the config were loaded.
    """
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{path} lacks {len(missing)} of the model's weights, the first is {missing[0]}; "
            "download the missing files again"
        )
    for name, found, expected in sorted(report["mismatched_keys"], key=lambda entry: entry[0]):
        raise _other_shape(str(path), name, found, expected)
    if is_whole:
        _require_no_more_layers(path, model, report["unexpected_keys"])


def require_shapes(model: nn.Module, expected: dict[str, torch.Size]) -> None:
    """Raise `ModelError` for a parameter whose loaded shape differs from the config's.

    Transformers 5.17 does not check shapes if a model has a quantizer.
    """
    for name, parameter in model.named_parameters():
        if parameter.shape != expected.get(name, parameter.shape):
            raise _other_shape("the checkpoint", name, parameter.shape, expected[name])


def require_source_shapes(
    model: nn.Module, weights: Mapping[str, StoredWeight], targets: Mapping[str, str]
) -> None:
    """Raise `ModelError` for a quantised matrix whose shape differs from the parameter's.

    `targets` maps names in the checkpoint to parameters. The shapes of experts, and of parameters
    made of several matrices, are checked when they are stored.
    """
    counts, parameters = Counter(targets.values()), dict(model.named_parameters())
    for name, weight in weights.items():
        target = targets.get(name, name)
        parameter = parameters.get(target)
        if parameter is None or parameter.dim() != 2 or len(weight.shape) != 2:
            continue
        if counts[target] < 2 and tuple(weight.shape) != tuple(parameter.shape):
            raise _other_shape("the checkpoint", target, weight.shape, parameter.shape)


def require_finite_weights(model: nn.Module) -> None:
    """Raise `ModelError` naming the first dense weight that is not finite."""
    for name, parameter in model.named_parameters():
        is_there = parameter.is_floating_point() and not parameter.is_meta
        if is_there and not is_finite(parameter):
            raise ModelError(
                f"the weight {name} holds NaN or infinity, expected finite numbers; the checkpoint "
                "is damaged: download it again"
            )


def _other_shape(
    where: str, name: str, found: Sequence[int], expected: Sequence[int]
) -> ModelError:
    return ModelError(
        f"{where} has {name} of shape {tuple(found)}, but config.json asks for {tuple(expected)}; "
        "use the config.json that belongs to these weights"
    )


def _require_no_more_layers(path: Path, model: PreTrainedModel, unexpected: set[str]) -> None:
    """Raise `ModelError` for a weight of a layer beyond the model's last layer and its MTP layers.

    Other unexpected weights are left to Transformers' own check.
    """
    if not unexpected:
        return
    # Module names cover packed weights, which a state dict would unpack.
    names = (f"{name}." for name, _ in model.named_modules())
    own = [match for name in names if (match := _LAYER.match(name))]
    num_layers: dict[str, int] = {}
    for match in own:
        num_layers[match[1]] = max(num_layers.get(match[1], 0), int(match[2]) + 1)
    ahead = value_of(model.config.get_text_config(), "num_nextn_predict_layers") or 0
    for name in sorted(unexpected):
        match = _LAYER.match(name)
        known = None if match is None else num_layers.get(match[1])
        if match is not None and known is not None and int(match[2]) >= known + ahead:
            raise ModelError(
                f"{path} has weights of layers that config.json does not count: {name}, where it "
                f"says {known} layers; use the config.json that belongs to these weights"
            )
