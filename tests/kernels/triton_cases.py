"""Batches of experts for the Triton kernels, against the reference: interpreted, or on a GPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.kernels.activations import apply_activation
from tandem.kernels.formats import ExpertLayout, unpack_expert
from tandem.kernels.formats.weight_format import WeightFormat
from tandem.kernels.native import ActivationKind, NativeActivation
from tandem.kernels.reference import expert_ffn
from tests.kernels.formats.sources import pack_expert

SWIGLU = NativeActivation(ActivationKind.SWIGLU)
ACTIVATIONS = (
    NativeActivation(ActivationKind.GELU_TANH_GATE),
    NativeActivation(ActivationKind.SWIGLU, 1.702, 0.7, 1.0),
    NativeActivation(ActivationKind.RELU2),
    None,
)


def tanh_gate(rows: Tensor) -> Tensor:
    """An activation that no kernel knows."""
    gate, up = rows.chunk(2, dim=-1)
    return torch.tanh(gate) * up


def relative_error(
    experts: Any,
    fmt: WeightFormat,
    counts: Sequence[int],
    *,
    hidden_size: int,
    intermediate_size: int,
    activation: NativeActivation | None = SWIGLU,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> float:
    """Compute experts with so many tokens each by `TritonExperts`; return the relative error."""
    from tandem.triton_kernels.rows import row_table

    generator = torch.Generator().manual_seed(0)
    is_gated = activation is None or activation.is_gated
    layout = ExpertLayout(fmt, hidden_size, intermediate_size, is_gated=is_gated, has_bias=True)
    inner = layout.num_halves * intermediate_size
    store = torch.zeros(len(counts), layout.num_bytes, dtype=torch.uint8)
    for buffer in store:
        up = torch.randn(inner, hidden_size, generator=generator) / hidden_size**0.5
        down = torch.randn(hidden_size, intermediate_size, generator=generator)
        biases = (
            torch.randn(inner, generator=generator),
            torch.randn(hidden_size, generator=generator),
        )
        pack_expert(layout, up, down / intermediate_size**0.5, *biases, out=buffer)
    num_tokens = max(counts) + 2
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).to(dtype)
    tokens = [torch.randperm(num_tokens, generator=generator)[:count].int() for count in counts]
    begin = [5, *(5 + torch.tensor(counts).cumsum(0)).tolist()]  # rows may begin anywhere
    there = store.to(device)
    table = row_table([buffer.data_ptr() for buffer in there], begin, torch.cat(tokens))
    out = torch.full((sum(counts), hidden_size), float("nan"), device=device)
    rows = table.on(table.memory.to(device))
    experts.compute(layout, activation, hidden.to(device), rows, out, tanh_gate)

    def activate(rows: Tensor) -> Tensor:
        return tanh_gate(rows) if activation is None else apply_activation(activation, rows)

    expected = torch.cat(
        [
            expert_ffn(hidden[chosen].float(), unpack_expert(layout, buffer), activate)
            for buffer, chosen in zip(store, tokens, strict=True)
        ]
    )
    return float((out.cpu() - expected).norm() / expected.norm())


def sum_error(experts: Any, num_cols: int, *, device: str = "cpu") -> float:
    """Add rows up in the router's order, padding among them; return the largest error."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(40, num_cols, generator=generator)
    row_of = torch.randint(-1, 40, (16, 8), generator=generator, dtype=torch.int32)
    weights = torch.rand(16, 8, generator=generator)
    out = torch.empty(16, num_cols, device=device)
    experts.add_rows(rows.to(device), row_of.to(device), weights.to(device), out)
    padded = torch.cat([rows, torch.zeros(1, num_cols)])  # -1 finds the zeros
    expected = torch.zeros(16, num_cols)
    for k in range(8):
        expected += weights[:, k, None] * padded[row_of[:, k].long()]
    return float((out.cpu() - expected).abs().max())
