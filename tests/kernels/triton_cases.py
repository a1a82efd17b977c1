"""Batches of experts for the Triton kernels, against the reference, interpreted or on a GPU."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tandem.kernels.formats.weight_format import WeightFormat
from tandem.kernels.native import ActivationKind, NativeActivation
from tests.kernels.layers import make_layer

SWIGLU = NativeActivation(ActivationKind.SWIGLU)
ACTIVATIONS = (
    NativeActivation(ActivationKind.GELU_TANH_GATE),
    NativeActivation(ActivationKind.SWIGLU, 1.702, 0.7, 1.0),
    NativeActivation(ActivationKind.RELU2),
    NativeActivation(ActivationKind.LIMITED_SILU, limit=0.7),
    NativeActivation(ActivationKind.SOFTCAPPED, 0.7, 1.3),
    None,
)


def tanh_gate(rows: Tensor) -> Tensor:
    """An activation that the kernels do not support."""
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
    """Compute experts with this many tokens each by `TritonExperts`; return the relative error."""
    from tandem.triton_kernels.rows import row_table

    random = torch.Generator().manual_seed(0)
    num_tokens = max(counts) + 2
    layer = make_layer(
        fmt, hidden_size, intermediate_size,
        [torch.randperm(num_tokens, generator=random)[:count].tolist() for count in counts],
        activation=activation or SWIGLU, has_bias=True,
    )  # fmt: skip
    hidden = torch.randn(num_tokens, hidden_size, generator=random).to(dtype)
    begin, token = layer.begins_and_tokens()
    there = layer.store.to(device)
    # Rows may begin anywhere.
    table = row_table([buffer.data_ptr() for buffer in there], (begin + 5).tolist(), token)
    out = torch.full((sum(counts), hidden_size), float("nan"), device=device)
    rows = table.on(table.memory.to(device))
    experts.compute(layer.layout, activation, hidden.to(device), rows, out, tanh_gate)
    other = tanh_gate if activation is None else None
    expected = torch.cat(
        replace(layer, hidden=hidden.float()).expected(is_rounded=False, activate=other)
    )
    return float((out.cpu() - expected).norm() / expected.norm())


def sum_error(experts: Any, num_cols: int, *, device: str = "cpu") -> float:
    """Sum results in the router's order, with padding; return the largest error."""
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
