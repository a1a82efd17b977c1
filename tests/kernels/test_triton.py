"""The Triton kernels: right in the interpreter, and accepted by the compiler for real GPUs.

The interpreter proves the arithmetic, the compiler that a GPU would take it; only tests/gpu runs
the two together. Skipped where Triton cannot be imported.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tandem.kernels.activations import apply_activation
from tandem.kernels.formats import FORMATS, ExpertLayout, find_format, pack_expert, unpack_expert
from tandem.kernels.formats.weight_format import WeightFormat
from tandem.kernels.native import ActivationKind, NativeActivation
from tandem.kernels.reference import expert_ffn

pytest.importorskip("triton")

# Neither is a multiple of a block, a group or a tile.
HIDDEN, INTERMEDIATE = 72, 40
SWIGLU = NativeActivation(ActivationKind.SWIGLU)
ACTIVATIONS = (
    NativeActivation(ActivationKind.GELU_TANH_GATE),
    NativeActivation(ActivationKind.SWIGLU, 1.702, 0.7, 1.0),
    NativeActivation(ActivationKind.RELU2),
    None,
)
FEW, MANY = (1, 2), (1, 18, 9)
# A GPU has 99 KiB of shared memory for a program at least, from compute capability 8.0 on.
SHARED_BYTES = 99 * 1024


@pytest.fixture(scope="module")
def triton_experts() -> Iterator[ModuleType]:
    """Import the kernels while Triton interprets: it decides when a kernel is decorated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TRITON_INTERPRET", "1")
        from tandem.kernels.triton import experts

        yield experts


def tanh_gate(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return torch.tanh(gate) * up


def check(
    experts: ModuleType,
    fmt: WeightFormat,
    counts: Sequence[int],
    activation: NativeActivation | None = SWIGLU,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Compute experts with so many tokens each; return the error relative to the reference."""
    from tandem.kernels.triton.rows import row_table

    generator = torch.Generator().manual_seed(0)
    is_gated = activation is None or activation.is_gated
    layout = ExpertLayout(fmt, HIDDEN, INTERMEDIATE, is_gated=is_gated, has_bias=True)
    inner = layout.num_halves * INTERMEDIATE
    store = torch.zeros(len(counts), layout.num_bytes, dtype=torch.uint8)
    for buffer in store:
        up, down = torch.randn(inner, HIDDEN, generator=generator) / 6, torch.randn(HIDDEN, 40) / 6
        biases = torch.randn(inner, generator=generator), torch.randn(HIDDEN, generator=generator)
        pack_expert(layout, up, down, *biases, out=buffer)
    num_tokens = max(counts) + 2
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    tokens = [torch.randperm(num_tokens, generator=generator)[:count].int() for count in counts]
    begin = [5, *(5 + torch.tensor(counts).cumsum(0)).tolist()]  # rows may begin anywhere
    table = row_table([buffer.data_ptr() for buffer in store], begin, torch.cat(tokens))
    out = torch.full((sum(counts), HIDDEN), float("nan"))
    kernels = experts.TritonExperts()
    kernels.compute(layout, activation, hidden, table.on(table.memory), out, tanh_gate)

    def activate(rows: Tensor) -> Tensor:
        return tanh_gate(rows) if activation is None else apply_activation(activation, rows)

    expected = torch.cat(
        [
            expert_ffn(hidden[chosen].float(), unpack_expert(layout, buffer), activate)
            for buffer, chosen in zip(store, tokens, strict=True)
        ]
    )
    return float((out - expected).norm() / expected.norm())


@pytest.mark.parametrize("counts", [FEW, MANY], ids=["vector", "matrix"])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_every_format_gives_what_the_reference_gives(
    triton_experts: ModuleType, fmt: WeightFormat, counts: tuple[int, ...]
) -> None:
    assert check(triton_experts, fmt, counts) < 2e-6


@pytest.mark.parametrize("counts", [FEW, MANY], ids=["vector", "matrix"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_every_activation_gives_what_the_reference_gives(
    triton_experts: ModuleType, activation: NativeActivation | None, counts: tuple[int, ...]
) -> None:
    assert check(triton_experts, find_format("int8-g32"), counts, activation) < 2e-6


@pytest.mark.parametrize(
    ("dtype", "counts"), [(torch.float16, MANY), (torch.float16, FEW), (torch.bfloat16, FEW)]
)
def test_activations_may_have_half_precision(
    triton_experts: ModuleType, dtype: torch.dtype, counts: tuple[int, ...]
) -> None:
    """The interpreter cannot multiply bf16 matrices; tests/gpu does."""
    assert check(triton_experts, find_format("int4"), counts, dtype=dtype) < 2e-3


@pytest.mark.parametrize("num_cols", [40, 1500])
def test_rows_are_added_in_the_routers_order(triton_experts: ModuleType, num_cols: int) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(5, num_cols, generator=generator)
    row_of = torch.tensor([[4, 0, 2], [-1, 3, 1]], dtype=torch.int32)
    weights = torch.rand(2, 3, generator=generator)
    out = torch.empty(2, num_cols)
    triton_experts.TritonExperts().add_rows(rows, row_of, weights, out)
    first = weights[0, 0] * rows[4] + weights[0, 1] * rows[0] + weights[0, 2] * rows[2]
    second = weights[1, 1] * rows[3] + weights[1, 2] * rows[1]
    torch.testing.assert_close(out, torch.stack([first, second]), rtol=1e-6, atol=1e-6)


def test_the_compiler_takes_the_kernels_for_every_supported_gpu() -> None:
    """Compiled to machine code without a GPU; with matrix units and 16-byte loads where meant."""
    command = [sys.executable, "-m", "tests.kernels.compile_triton", "90", "80", "86", "89", "7"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert {result["sm"] for result in results} == {80, 86, 89, 90}
    for result in results:
        assert result["cubin_bytes"] > 0
        assert result["shared_bytes"] <= SHARED_BYTES, result
        assert result["wide_loads"] > 0, result
        assert (result["matrix_units"] > 0) == result["kernel"].startswith("matrix"), result
