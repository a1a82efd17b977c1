"""Finds from names alone whether a checkpoint lacks tensors of a layer or an expert."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from tandem.core.errors import ModelError
from tandem.hf.checkpoint import AnyCheckpoint, Checkpoint
from tandem.hf.compat import dispensable_weights, target_names
from tandem.hf.experts import is_experts_module
from tandem.hf.load import empty_model, open_foreign, source_config

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")  # index of a layer or an expert, but not the 1 of w1


def require_complete(checkpoint: AnyCheckpoint) -> None:
    """Raise `ModelError` if a checkpoint lacks tensors of a layer or an expert.

    Packed checkpoints are not checked: they are complete by construction.
    """
    if checkpoint.is_packed:
        return
    if isinstance(checkpoint, Checkpoint) and checkpoint.quantization is None:
        config, names = source_config(checkpoint), list(checkpoint.files.entries)
    else:
        config, source = open_foreign(checkpoint)
        names = list(source.state_dict())
    require_all_tensors(checkpoint.path, empty_model(config), names)


def require_all_tensors(path: Path, model: nn.Module, names: Iterable[str]) -> None:
    """Raise `ModelError` naming the first parameter or expert without its tensor.

    `model` may be on the meta device; `names` are tensor names as in an unquantised checkpoint.
    """
    tensors = defaultdict(list)
    for name, parameter in target_names(model, names).items():
        tensors[parameter].append(name)
    _require_parameters(path, model, set(tensors))
    _require_experts(path, model, tensors)


def _require_parameters(path: Path, model: nn.Module, found: set[str]) -> None:
    """Raise `ModelError` if a parameter has no tensor although another layer's has one.

    `found` are the names of the parameters with tensors. A parameter without a tensor in any layer
    is not required: in a few architectures some tensors are matched only by loading, and then for
    all layers.
    """
    by_id: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id[id(parameter)].append(name)  # tied parameters need only one tensor
    kinds = set(map(_kind, found))
    dispensable = dispensable_weights(model)
    missing = [
        names[0]
        for names in by_id.values()
        if not found.intersection(names)
        and kinds.intersection(map(_kind, names))
        and not any(re.search(pattern, name) for pattern in dispensable for name in names)
    ]
    if missing:
        raise ModelError(
            f"{path} lacks {len(missing)} of the model's weights, the first is {missing[0]}; "
            "download the missing files again"
        )


def _require_experts(path: Path, model: nn.Module, tensors: dict[str, list[str]]) -> None:
    """Raise `ModelError` if an experts module lacks tensors of some of its experts."""
    sources = {
        f"{module_name}.{name}": (len(parameter), Counter(map(_kind, tensors[full_name])))
        for module_name, module in model.named_modules()
        if is_experts_module(module)
        for name, parameter in module.named_parameters(recurse=False)
        if (full_name := f"{module_name}.{name}") in tensors
    }
    # If some layers have a kind of tensor, such as experts' w1, all layers need it.
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for name, (_, counts) in sources.items():
        kinds[_kind(name)] |= counts
    for name, (num_experts, counts) in sources.items():
        for kind, most in kinds[_kind(name)].items():
            expected = num_experts if most > 1 else 1
            if counts[kind] < expected:
                raise ModelError(
                    f"{path} has {counts[kind]} of the {expected} tensors {kind} of {name}; "
                    "download the missing files again"
                )


def _kind(name: str) -> str:
    return _INDEX.sub("*", name)
