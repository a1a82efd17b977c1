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
from typing import Any

import pytest
import torch

from tandem.kernels.formats import FORMATS, find_format
from tandem.kernels.formats.weight_format import WeightFormat
from tandem.kernels.native import NativeActivation
from tests.kernels.triton_cases import ACTIVATIONS, SWIGLU, relative_error, sum_error

pytest.importorskip("triton")

# Neither is a multiple of a block, a group or a tile.
HIDDEN, INTERMEDIATE = 72, 40
FEW, MANY, ONE_TILE = (1, 2), (1, 18, 9), (9,)
# Shared memory that a program may have, by compute capability (CUDA C programming guide, table of
# technical specifications).
SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 120: 99}


@pytest.fixture(scope="module")
def triton_experts() -> Iterator[ModuleType]:
    """Import the kernels while Triton interprets: it decides when a kernel is decorated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TRITON_INTERPRET", "1")
        from tandem.triton_kernels import experts

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


@pytest.mark.parametrize("counts", [FEW, ONE_TILE], ids=["vector", "matrix"])
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
    """Compile in a process in which Triton does not interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return results


def require_ordered(code: dict[str, list[str]]) -> None:
    """Numbers before the flag, for the whole system; flags and numbers past the caches."""
    numbers, barrier, fence, flag = code["publish"][-4:]
    assert "st.global" in numbers
    assert "bar.sync" in barrier
    assert "fence.acq_rel.sys" in fence
    assert "st.global" in flag
    assert sum("ld.volatile.global" in line for line in code["wait_for"]) == 2
    assert any("nanosleep" in line for line in code["wait_for"])
    assert any("fence.acq_rel.sys" in line for line in code["wait_for"])
    assert any("ld.volatile.global" in line for line in code["collect"])


def test_the_compiler_takes_the_kernels_for_every_supported_gpu() -> None:
    """Compiled to machine code without a GPU, within what each has; 16-byte loads where meant."""
    gpus = ["90", "80", "86", "89", "120", "75"]
    *results, by_hand = compiler_says("tests.kernels.compile_triton", *gpus, "17")
    require_ordered(by_hand["hand_off"])
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


def test_all_kernels_of_a_model_are_compiled_when_it_is_loaded_and_are_few() -> None:
    """Twenty prompts with steps after them: no kernel is compiled for their lengths or tables."""
    experts, one, two = compiler_says("tests.kernels.count_variants")
    for counts in (experts, one, two):
        assert counts["met"] > 10
        assert counts["later"] == 0
    assert experts["loaded"] <= 14
    assert one["loaded"] <= 20  # with packed linear layers of one format, whatever their shapes
    assert two["loaded"] <= 26


@pytest.fixture(scope="module")
def hand_off(triton_experts: ModuleType) -> ModuleType:
    from benchmarks.gpu import hand_off_kernels as hand_off

    return hand_off


def test_numbers_are_handed_over_before_their_flag_and_back(hand_off: ModuleType) -> None:
    source = torch.arange(16, dtype=torch.int32)
    numbers, flag, out = torch.zeros(16).int(), torch.zeros(1).int(), torch.zeros(16).int()
    for sets_flag in (False, True):
        hand_off.publish[(1,)](numbers, flag, source, count=16, sets_flag=sets_flag, on_gpu=False)
        assert numbers.tolist() == list(range(1, 17))
        assert flag.item() == int(sets_flag)
    for is_volatile in (False, True):
        hand_off.collect[(1,)](numbers, out.zero_(), count=16, is_volatile=is_volatile)
        assert out.tolist() == numbers.tolist()


def test_a_flag_is_waited_for_and_reset_and_a_missing_one_holds_nobody(
    hand_off: ModuleType,
) -> None:
    for value, seen_value in ((1, 1), (0, 0)):
        flag, seen = torch.tensor([value]).int(), torch.tensor([7]).int()
        hand_off.wait_for[(1,)](flag, seen, most_polls=3, on_gpu=False)
        assert (flag.item(), seen.item()) == (0, seen_value)
