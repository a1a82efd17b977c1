"""Tests of the Triton kernels: correct in the interpreter, accepted by the compiler for real GPUs.

The interpreter checks the arithmetic, the compiler that a GPU would accept the code; only tests/gpu
runs both together. Skipped if Triton cannot be imported.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from tandem.kernels.formats import FORMATS, find_format
from tandem.kernels.formats.weight_format import WeightFormat
from tandem.kernels.native import NativeActivation
from tests.kernels.interpreter import interpreted_module
from tests.kernels.triton_cases import ACTIVATIONS, SWIGLU, relative_error, sum_error

pytest.importorskip("triton")

# Neither is a multiple of a block, a group or a tile.
HIDDEN, INTERMEDIATE = 72, 40
FEW, MANY, ONE_EXPERT, ONE_TILE = (1, 2), (1, 18, 9), (2,), (9,)
# Shared memory that a program may have, by compute capability (CUDA C programming guide, table of
# technical specifications).
SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 120: 99}


triton_experts = interpreted_module("tandem.triton_kernels.experts")


def check(
    experts: ModuleType,
    fmt: WeightFormat,
    counts: Sequence[int],
    activation: NativeActivation | None = SWIGLU,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Compute experts with this many tokens each; return the error relative to the reference."""
    return relative_error(
        experts.TritonExperts(),
        fmt,
        counts,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        activation=activation,
        dtype=dtype,
    )


@pytest.mark.parametrize("counts", [ONE_EXPERT, ONE_TILE], ids=["vector", "matrix"])
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


def compiler_says(*arguments: str) -> list[dict[str, Any]]:
    """Compile in a process that does not interpret Triton."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.mark.slow
def test_the_compiler_takes_the_kernels_for_every_supported_gpu() -> None:
    """Compile to machine code without a GPU, within each GPU's limits; check 16-byte loads."""
    gpus = ["90", "80", "86", "89", "120", "75"]
    results = compiler_says("tests.kernels.compile_triton", *gpus, "17")
    assert {str(result["sm"]) for result in results} == set(gpus)
    for result in results:
        assert result["cubin_bytes"] > 0
        assert result["shared_bytes"] <= SHARED_KIB[result["sm"]] * 1024, result
        assert result["spilled_bytes"] == 0, result
        on_matrix_units = (
            result["kernel"].startswith("matrix")
            and "float32" not in result["case"]
            and result["sm"] >= 80
        )
        assert (result["matrix_units"] > 0) == on_matrix_units, result
        if not result["kernel"].startswith("matrix") or on_matrix_units:
            assert result["wide_loads"] > 0, result


@pytest.mark.slow
def test_without_matrix_units_gpus_from_80_on_run_the_same_llvm_code() -> None:
    """So `launch_triton.py` compiles these kernels of each format for one GPU only."""
    results = compiler_says("tests.kernels.compile_triton", "--unlike", "89", "90", "120")
    unlike = {result["kernel"] for result in results if result["is_unlike"]}
    assert "matrix_up" in unlike
    assert unlike <= {"matrix_up", "matrix_down"}


def test_all_kernels_of_a_model_are_compiled_when_it_is_loaded_and_are_few() -> None:
    """Twenty prompts with later steps: no length or table compiles another kernel."""
    experts, one, two = compiler_says("tests.kernels.count_variants")
    for counts in (experts, one, two):
        assert counts["met"] > 10
        assert counts["later"] == 0
    assert experts["loaded"] <= 15
    assert one["loaded"] <= 21  # with packed linear layers of one format, whatever their shapes
    assert two["loaded"] <= 27
