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

from tandem.kernels.formats import FORMATS, find_format
from tandem.kernels.formats.weight_format import WeightFormat
from tandem.kernels.native import NativeActivation
from tests.kernels.triton_cases import ACTIVATIONS, SWIGLU, relative_error, sum_error

pytest.importorskip("triton")

# Neither is a multiple of a block, a group or a tile.
HIDDEN, INTERMEDIATE = 72, 40
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


def check(
    experts: ModuleType,
    fmt: WeightFormat,
    counts: Sequence[int],
    activation: NativeActivation | None = SWIGLU,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Compute experts with so many tokens each; return the error relative to the reference."""
    return relative_error(
        experts.TritonExperts(),
        fmt,
        counts,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        activation=activation,
        dtype=dtype,
    )


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
    assert sum_error(triton_experts.TritonExperts(), num_cols) < 1e-5


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
