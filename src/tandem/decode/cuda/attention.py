"""Chooses decode attention on a GPU: Triton kernels if a trial succeeds, else torch."""

import dataclasses
import functools
import importlib.util
import warnings
from collections.abc import Callable
from functools import partial

import torch

from tandem.core.errors import TandemWarning
from tandem.devices.cuda.checks import TRITON_ATTENTION_CAPABILITY, TRITON_MATRIX_CAPABILITY
from tandem.foreign_types import PreTrainedModel
from tandem.kernels.attention import AttentionForm
from tandem.kernels.device_states import Run, SlotTokens, StateKernels, StateMemory
from tandem.kernels.hyper_connections import HyperConnection, StreamKernels
from tandem.kernels.recurrent import Compression, Convolution
from tandem.kv_cache.cuda.layers import DecodeKernels, LayerMemory
from tandem.kv_cache.stand_ins import compresses

_TRIED = AttentionForm(num_heads=2, num_kv_heads=1, key_dim=64, value_dim=64, scale=1.0)
_TRIED_WINDOW = dataclasses.replace(_TRIED, window=2)
_TRIED_RING = 16  # positions


@functools.lru_cache(maxsize=8)
def decode_kernels(device: torch.device) -> DecodeKernels | None:
    """Return Triton's attention kernels for a GPU.

    None if torch must attend: Triton is missing, the GPU is too old for it, or a trial fails.
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    if capability < TRITON_ATTENTION_CAPABILITY:
        return None
    from tandem.triton_kernels.decode_attention import DecodeAttention

    kernels = DecodeAttention(
        properties.multi_processor_count, has_small_tiles=capability < TRITON_MATRIX_CAPABILITY
    )
    return kernels if _works(partial(_try, kernels, device), device) else None


@functools.lru_cache(maxsize=8)
def compressed_kernels(device: torch.device) -> DecodeKernels | None:
    """Return the attention kernels for a model with compressed keys; None if torch must attend.

    A second trial covers compressors and residual streams too, because such a model has them.
    """
    kernels = decode_kernels(device)
    if kernels is None:
        return None
    return kernels if _works(partial(_try_compressed, kernels, device), device) else None


def _works(trial: Callable[[], None], device: torch.device) -> bool:
    """Run a trial of kernels; return whether it succeeds, and warn if it does not."""
    try:
        with torch.cuda.device(device):
            trial()
    except Exception as error:  # Triton's compilers and tools raise what they like
        first_line = str(error).partition("\n")[0]
        warnings.warn(
            f"Triton's attention cannot be used here ({first_line}), so decode steps attend with "
            "torch, slower for long texts",
            TandemWarning,
            stacklevel=3,
        )
        return False
    return True


def kernels_for(model: PreTrainedModel) -> DecodeKernels | None:
    """Return the attention kernels for a model on a GPU; None if torch must attend."""
    return (compressed_kernels if compresses(model) else decode_kernels)(model.device)


def state_kernels(kernels: DecodeKernels | None) -> StateKernels | None:
    """Return Triton's kernels that advance states.

    None without attention `kernels`; torch must then advance them.
    """
    if kernels is None:
        return None
    from tandem.triton_kernels.states import TritonStates

    return TritonStates()


def stream_kernels(kernels: DecodeKernels | None) -> StreamKernels | None:
    """Return Triton's kernels that mix residual streams.

    None without attention `kernels`; the model's own code must then mix them.
    """
    if kernels is None:
        return None
    from tandem.triton_kernels.hyper_connections import TritonStreams

    return TritonStreams()


def _try(kernels: DecodeKernels, device: torch.device) -> None:
    """Attend to one token, and run a convolution; raise an error if a result is wrong.

    Attention to a single token must return the token's value.
    """
    zeros = partial(_zeros, device)
    layer = LayerMemory(_TRIED, 1, 16, torch.float16, zeros)
    places = (torch.zeros(1, dtype=torch.int64, device=device),) * 2  # slot 0, position 0
    query = torch.ones(2, 1, 64, dtype=torch.float16, device=device)
    token = (query, query[:1], query[:1])
    out = kernels(_TRIED, layer.where, *places, *token, None, layer.kind)
    if not torch.equal(out, torch.ones_like(out)):
        raise RuntimeError("it gives other numbers than torch")
    states = state_kernels(kernels)
    assert states is not None
    convolution = Convolution(torch.ones(2, 64, device=device).t(), None, has_silu=False)
    tokens = SlotTokens(torch.tensor([Run(0, 0, 2, 2)], device=device), 2)
    memory = StateMemory(zeros((1, 1, 64), torch.float32), zeros((1, 2, 7, 64), torch.float32))
    x = query[:, 0]
    out = states.convolve(convolution, memory, tokens, x)
    if not torch.equal(out, x.cumsum(0).to(x.dtype)):
        raise RuntimeError("convolutions give other numbers than torch")


def _try_compressed(kernels: DecodeKernels, device: torch.device) -> None:
    """Try the kernels of a model with compressed keys; raise an error if a result is wrong.

    The kernels attend to a window and a compressed key, compute and select compressed keys, and mix
    residual streams.
    """
    states, streams = state_kernels(kernels), stream_kernels(kernels)
    assert states is not None
    assert streams is not None
    zeros = partial(_zeros, device)
    layer = LayerMemory(_TRIED_WINDOW, 1, _TRIED_RING + 2, torch.float16, zeros, has_values=False)
    one = torch.ones(2, 1, 64, dtype=torch.float16, device=device)
    slots, positions = (torch.full((1,), n, dtype=torch.int64, device=device) for n in (0, 1))
    # Weights are equal: of position 0 (zeros), of this one (ones), and of the key of both (twos).
    out = kernels.in_windows(
        _TRIED_WINDOW, layer.where, slots, positions, torch.zeros_like(one), one[:1], 2 * one[:1],
        None, None, layer.kind, _TRIED_RING, 2,
    )  # fmt: skip
    if not torch.equal(out, torch.ones_like(out)):
        raise RuntimeError("in windows it gives other numbers than torch")
    index_keys = zeros((1, 4, 64), torch.float32)
    index_keys[0, 0] = 2  # greater than this token's
    chosen = kernels.select_keys(
        index_keys, slots, positions, one[0], one.transpose(0, 1), one[:1, 0, :2].float(),
        block=1, scale=1.0, most=1, length=4,
    )  # fmt: skip
    seen = kernels.select_keys_of_prompt(  # two tokens, of which the second has a worse key
        index_keys[0, :2], torch.arange(2, device=device), one, one[:, 0, :1].float(),
        block=1, scale=1.0, most=1, first=0,
    )  # fmt: skip
    is_first = torch.tensor([[True, False]] * 2, device=device)
    if not (torch.equal(chosen, slots[None]) and torch.equal(seen, is_first)):
        raise RuntimeError("indexers give other numbers than torch")
    operation = Compression(zeros((2, 64), torch.float32), 1)
    rings, both = zeros((1, *operation.state_shape), torch.float32), one[:, 0]
    values = both * torch.tensor([[0], [2]], device=device)
    where = torch.zeros(2, dtype=torch.int64, device=device), torch.arange(2, device=device)
    keys = states.compress(operation, rings, *where, values, both)
    if not torch.equal(keys, values / 2):
        raise RuntimeError("compressors give other numbers than torch")
    connection = HyperConnection(1.0, 0.0, output_factor=2.0, num_rounds=1)
    token = one.transpose(0, 1)  # of two streams
    matrix, base = zeros((8, 128), torch.float32), zeros((8,), torch.float32)
    mixed, weights = streams.mix_in(connection, token, matrix, base, torch.ones(3, device=device))
    if not torch.equal(streams.mix_out(mixed, weights, token), 2 * token):
        raise RuntimeError("hyper-connections give other numbers than torch")


def _zeros(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)
