"""What attends in decode steps on a GPU: Triton kernels, tried once, or torch."""

import functools
import importlib.util
import warnings

import torch

from tandem.core.errors import TandemWarning
from tandem.devices.cuda.checks import TRITON_ATTENTION_CAPABILITY, TRITON_MATRIX_CAPABILITY
from tandem.kernels.attention import AttentionForm
from tandem.kernels.device_states import Run, SlotTokens, StateKernels, StateMemory
from tandem.kernels.hyper_connections import StreamKernels
from tandem.kernels.recurrent import Convolution
from tandem.kv_cache.cuda.layers import DecodeKernels, LayerMemory

_TRIED = AttentionForm(num_heads=2, num_kv_heads=1, key_dim=64, value_dim=64, scale=1.0)


@functools.lru_cache(maxsize=8)
def decode_kernels(device: torch.device) -> DecodeKernels | None:
    """Return what attends on a GPU; None: torch, also where Triton is missing or fails."""
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
    try:
        with torch.cuda.device(device):
            _try(kernels, device)
    except Exception as error:  # Triton's compilers and tools raise what they like
        first_line = str(error).partition("\n")[0]
        warnings.warn(
            f"Triton's attention cannot be used here ({first_line}), so decode steps attend with "
            "torch, slower for long texts",
            TandemWarning,
            stacklevel=2,
        )
        return None
    return kernels


def state_kernels(kernels: DecodeKernels | None) -> StateKernels | None:
    """Return what advances states where `kernels` attend; None: torch."""
    if kernels is None:
        return None
    from tandem.triton_kernels.states import TritonStates

    return TritonStates()


def stream_kernels(kernels: DecodeKernels | None) -> StreamKernels | None:
    """Return what mixes residual streams where `kernels` attend; None: the model's own code."""
    if kernels is None:
        return None
    from tandem.triton_kernels.hyper_connections import TritonStreams

    return TritonStreams()


def _try(kernels: DecodeKernels, device: torch.device) -> None:
    """Attend to one token, whose value is then the result; raises what is wrong."""

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

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
