"""The Triton kernels on a real GPU: every format, every activation, both regimes, bf16 too."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tandem.kernels.activations import apply_activation
from tandem.kernels.formats import FORMATS, ExpertLayout, find_format, pack_expert, unpack_expert
from tandem.kernels.formats.weight_format import WeightFormat
from tandem.kernels.native import ActivationKind, NativeActivation
from tandem.kernels.reference import expert_ffn
from tests.gpu.models import DEVICE

HIDDEN, INTERMEDIATE = 264, 200  # no multiple of a tile; fp8's 128 and int4z's padding too
SWIGLU = NativeActivation(ActivationKind.SWIGLU)
FEW, SOME, MANY = (1, 2), (3, 8, 1), (1, 200, 65)


def tanh_gate(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return torch.tanh(gate) * up


def error_of(
    fmt: WeightFormat,
    counts: Sequence[int],
    activation: NativeActivation | None = SWIGLU,
    dtype: torch.dtype = torch.bfloat16,
) -> float:
    """Compute experts with so many tokens each on the GPU; return the relative error."""
    from tandem.kernels.triton.experts import TritonExperts
    from tandem.kernels.triton.rows import row_table

    generator = torch.Generator().manual_seed(0)
    is_gated = activation is None or activation.is_gated
    layout = ExpertLayout(fmt, HIDDEN, INTERMEDIATE, is_gated=is_gated, has_bias=True)
    inner = layout.num_halves * INTERMEDIATE
    store = torch.zeros(len(counts), layout.num_bytes, dtype=torch.uint8)
    for buffer in store:
        up = torch.randn(inner, HIDDEN, generator=generator) / 16
        down = torch.randn(HIDDEN, INTERMEDIATE, generator=generator) / 14
        biases = torch.randn(inner, generator=generator), torch.randn(HIDDEN, generator=generator)
        pack_expert(layout, up, down, *biases, out=buffer)
    on_gpu = store.to(DEVICE)
    hidden = torch.randn(max(counts) + 2, HIDDEN, generator=generator).to(dtype)
    tokens = [torch.randperm(len(hidden), generator=generator)[:count].int() for count in counts]
    begin = [0, *torch.tensor(counts).cumsum(0).tolist()]
    table = row_table([buffer.data_ptr() for buffer in on_gpu], begin, torch.cat(tokens))
    out = torch.full((sum(counts), HIDDEN), float("nan"), device=DEVICE)
    TritonExperts().compute(
        layout, activation, hidden.to(DEVICE), table.on(table.memory.to(DEVICE)), out, tanh_gate
    )

    def activate(rows: Tensor) -> Tensor:
        return tanh_gate(rows) if activation is None else apply_activation(activation, rows)

    expected = torch.cat(
        [
            expert_ffn(hidden[chosen].float(), unpack_expert(layout, buffer), activate)
            for buffer, chosen in zip(store, tokens, strict=True)
        ]
    )
    return float((out.cpu() - expected).norm() / expected.norm())


@pytest.mark.parametrize("counts", [FEW, MANY], ids=["vector", "matrix"])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_every_format_gives_what_the_reference_gives(
    fmt: WeightFormat, counts: tuple[int, ...]
) -> None:
    # Vector sums are fp32; the matrix units take weights and activations rounded to bf16.
    assert error_of(fmt, counts) < (1e-4 if counts is FEW else 8e-3)


@pytest.mark.parametrize(
    "activation",
    [
        NativeActivation(ActivationKind.GELU_TANH_GATE),
        NativeActivation(ActivationKind.SWIGLU, 1.702, 0.7, 1.0),
        NativeActivation(ActivationKind.RELU2),
        None,
    ],
    ids=str,
)
@pytest.mark.parametrize("counts", [FEW, MANY], ids=["vector", "matrix"])
def test_every_activation_gives_what_the_reference_gives(
    activation: NativeActivation | None, counts: tuple[int, ...]
) -> None:
    assert error_of(find_format("int4"), counts, activation) < 8e-3


@pytest.mark.parametrize("counts", [SOME, (9, 16), (20, 30)], ids=str)
def test_every_size_of_tile_gives_what_the_reference_gives(counts: tuple[int, ...]) -> None:
    assert error_of(find_format("int4"), counts) < 8e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes_of_activations(dtype: torch.dtype) -> None:
    for counts in (FEW, MANY):
        assert error_of(find_format("int8"), counts, dtype=dtype) < (
            1e-5 if dtype == torch.float32 else 2e-3
        )


def test_rows_are_added_in_the_routers_order() -> None:
    from tandem.kernels.triton.experts import TritonExperts

    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(40, 1500, generator=generator)
    row_of = torch.randint(-1, 40, (16, 8), generator=generator, dtype=torch.int32)
    weights = torch.rand(16, 8, generator=generator)
    out = torch.empty(16, 1500, device=DEVICE)
    TritonExperts().add_rows(rows.to(DEVICE), row_of.to(DEVICE), weights.to(DEVICE), out)
    padded = torch.cat([rows, torch.zeros(1, 1500)])
    expected = (weights[:, :, None] * padded[row_of.long()]).sum(1)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)
