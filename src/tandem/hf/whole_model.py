"""Checks that a dense model fits on a GPU as a whole, before anything is read."""

import dataclasses
from collections.abc import Iterator, Mapping

import torch

from tandem.checkpoint.config_values import value_of
from tandem.devices.cuda.streams import memory_of
from tandem.experts.cache.sizing import DeviceMemory, parse_gpu_memory, require_whole
from tandem.experts.store.host_store import HostStore
from tandem.foreign_types import PreTrainedConfig, PreTrainedModel
from tandem.hf.config import OffloadConfig
from tandem.hf.dense import has_kernels
from tandem.hf.dense_bytes import device_bytes, layer_formats
from tandem.hf.kv_sizes import USUAL_CONTEXT, kv_sizes_of
from tandem.hf.steps import MAX_STEP_TOKENS
from tandem.kernels.formats.weight_format import WeightFormat

# Formats that an error suggests when a model does not fit, largest first.
SMALLER_FORMATS = ("int8", "int4")


def require_room(
    gpu_memory: str,
    memory: DeviceMemory,
    parts: Mapping[str, int],
    smaller: Mapping[str, int],
) -> int:
    """Return a GPU's budget for a dense model; raises `CapacityError` if the model does not fit.

    `parts` has a plan's bytes by part, including `dense`. `smaller` maps each option that would
    shrink the `dense` part to that part's smaller size, the largest first.
    """
    names = {"dense": "weights", "kv_cache": "keys and values", "workspace": "activations"}
    others = sum(parts.values()) - parts["dense"]
    named = {name: parts[key] for key, name in names.items()}
    fitting = ((how, dense + others) for how, dense in smaller.items())
    return require_whole(parse_gpu_memory(gpu_memory), memory, named, fitting)


def require_room_for(
    model: PreTrainedModel,
    device: torch.device,
    options: OffloadConfig,
    codes: Mapping[str, WeightFormat | None],
    *,
    is_stored: bool,
) -> None:
    """Raise `CapacityError` if a GPU cannot hold a dense model whose weights are not read yet.

    `codes` are the formats of a quantised checkpoint's layers, by weight. `is_stored` says that
    packed files fix the formats, so that the error must not suggest others.
    """
    config = model.config.get_text_config()
    longest = value_of(config, "max_position_embeddings") or USUAL_CONTEXT
    num_tokens = options.context or min(USUAL_CONTEXT, longest)
    parts = {
        "dense": _bytes_with(model, options, codes),
        "kv_cache": kv_sizes_of(config, model.dtype, latents=1).device_bytes_of(num_tokens),
        "workspace": prompt_bytes(config, num_tokens, 1),
    }
    smaller: dict[str, int] = {}
    if not is_stored and has_kernels():
        smaller = dict(_smaller(model, options, codes))
    require_room(options.gpu_memory, memory_of(device), parts, smaller)


def prompt_bytes(config: PreTrainedConfig, num_tokens: int, top_k: int) -> int:
    """Return the most bytes that the activations of a prefill step take.

    These are mainly the routed tokens' fp32 results. `top_k` is 1 for a dense model. A prompt that
    is longer than a step (`MAX_STEP_TOKENS`) takes no more than one step.
    """
    return min(MAX_STEP_TOKENS, num_tokens) * (top_k + 2) * int(config.hidden_size) * 4


def _bytes_with(
    model: PreTrainedModel, options: OffloadConfig, codes: Mapping[str, WeightFormat | None]
) -> int:
    """Return the bytes of a model on a GPU, with layers packed as `options` and `codes` say."""
    if not has_kernels():
        return device_bytes(model, {})
    found = layer_formats(model, HostStore(), options, codes, on_device=True)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return device_bytes(model, {path: x for path, x in found.items() if f"{path}.weight" in names})


def _smaller(
    model: PreTrainedModel, options: OffloadConfig, codes: Mapping[str, WeightFormat | None]
) -> Iterator[tuple[str, int]]:
    for name in SMALLER_FORMATS:
        other = dataclasses.replace(options, dense_dtype=name)
        yield f"dense_dtype={name!r}", _bytes_with(model, other, dict.fromkeys(codes))
