"""Bytes of a sequence's states, from one run of the model on the meta device."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from tandem.decode.substitutions.compressors import compresses, compression_of
from tandem.foreign_types import PreTrainedModel
from tandem.hf.compat import cache_argument, own_cache_class, reference_warnings_held
from tandem.hf.experts import is_experts_module
from tandem.hf.steps import MAX_STEP_TOKENS
from tandem.kv_cache.checkpoints import most_checkpoints
from tandem.kv_cache.states import most_checkpoint_bytes

# Bytes of activations per value that a mixing layer convolves, with a recurrence (Qwen3-Next,
# Qwen3.6, Nemotron 3), and with only a convolution (LFM2); fitted by `python -m benchmarks.plan`.
_BYTES_OF_RECURRENCE, _BYTES_OF_CONVOLUTION = 11, 6
_PROJECTIONS_BACK = ("out", "o_proj")  # projections back to the hidden states
_STATE_BYTES = 4  # slots keep states in fp32


def state_bytes_of(model: PreTrainedModel) -> int:
    """Return the bytes of one sequence's states; `model` must be on the meta device.

    The experts are not run. Returns 0 for a model without states, and for a model that cannot run
    on the meta device.
    """
    windows = [compression_of(part) for part in model.modules() if compresses(part)]
    if windows:
        return _STATE_BYTES * sum(math.prod(window.state_shape) for window in windows)
    cache = DynamicCache(config=model.config.get_text_config())
    if not any(hasattr(layer, "conv_states") for layer in cache.layers):
        return 0
    for module in model.modules():
        if is_experts_module(module):
            module.forward = lambda hidden_states, *_: hidden_states
    own = own_cache_class(model)
    cache = cache if own is None else own()
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode(), torch.device("meta"), reference_warnings_held():
            model(input_ids=ids, use_cache=True, **{cache_argument(model): cache})
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError):
        return 0
    held = _tensors(getattr(cache, "linear_cache", None))
    return _STATE_BYTES * sum([*map(_num_values, cache.layers), *(x.numel() for x in held)])


def mixer_token_bytes(model: nn.Module) -> int:
    """Return the most bytes of a token's activations in a layer with states; 0: no such layer."""
    return max((_mixer_bytes(part) for part in model.modules()), default=0)


def _mixer_bytes(part: nn.Module) -> int:
    """Return a token's activation bytes in a module with a convolution over tokens, otherwise 0."""
    children = dict(part.named_children())
    convolved = [child.in_channels for child in children.values() if isinstance(child, nn.Conv1d)]
    if not convolved:
        return 0
    projected = [
        child.out_features
        for name, child in children.items()
        if isinstance(child, nn.Linear) and not name.startswith(_PROJECTIONS_BACK)
    ]
    # Its own parameters are decay rates.
    has_recurrence = any(True for _ in part.named_parameters(recurse=False))
    # What the convolutions take, or the values of one projection that contain it.
    width = max([sum(convolved), *projected])
    return width * (_BYTES_OF_RECURRENCE if has_recurrence else _BYTES_OF_CONVOLUTION)


def checkpoint_bytes(
    state_bytes: int, num_tokens: int, num_sequences: int, available_bytes: int
) -> int:
    """Return the most bytes that checkpoints take in conversations of `num_tokens` tokens each.

    `state_bytes` are those of one sequence. `available_bytes` is the memory that is free once the
    model is loaded.
    """
    needed = state_bytes * most_checkpoints(num_tokens, MAX_STEP_TOKENS, num_sequences)
    return min(needed, most_checkpoint_bytes(available_bytes))


def _num_values(layer: object) -> int:
    """Return the number of values that slots keep of the states in a layer of Transformers' cache.

    Of a convolution's state, they keep one token less than its width.
    """
    convolutions, recurrences = (
        _tensors(getattr(layer, name, None)) for name in ("conv_states", "recurrent_states")
    )
    kept = sum(state.numel() // state.shape[-1] * (state.shape[-1] - 1) for state in convolutions)
    return kept + sum(state.numel() for state in recurrences)


def _tensors(states: object) -> list[Tensor]:
    """Return the tensors in `states`: a tensor, an iterable, a mapping's values; [] for None."""
    values = states.values() if isinstance(states, Mapping) else states
    values = values if isinstance(values, Iterable) and not isinstance(values, Tensor) else [values]
    return [value for value in values if isinstance(value, Tensor)]
