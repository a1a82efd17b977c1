"""Compiles the Triton kernels for GPUs that are not here; prints the compiler's results as JSON.

    python -m tests.kernels.compile_triton 80 90 11    # capabilities, then how many cases
    python -m tests.kernels.compile_triton --unlike 80 90    # which kernels become other LLVM code

It is a program of its own because tests interpret the kernels in their process.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tandem.kernels.formats import ExpertLayout, find_format
from tandem.kernels.native import ActivationKind, NativeActivation
from tandem.triton_kernels import combine, experts, linear, matrix, vector
from tandem.triton_kernels.rows import row_table

_POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
    torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SWIGLU = NativeActivation(ActivationKind.SWIGLU)
RELU2 = NativeActivation(ActivationKind.RELU2)
CLAMPED = NativeActivation(ActivationKind.SWIGLU, 1.702, 7.0, 1.0)


class Launch(NamedTuple):
    """The arguments of a kernel launch."""

    kernel: Any
    args: tuple[Tensor | int | None, ...]
    constants: dict[str, Any]


class _Noted:
    """Replaces a kernel and records its launches."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self._launches.append(Launch(self._kernel, args, kwargs))


def noted_launches() -> list[Launch]:
    """Replace the expert kernels; return the list to which each launch is appended."""
    return noted_launches_of(
        (
            (vector, ("vector_up", "vector_down")),
            (matrix, ("matrix_up", "matrix_down")),
            (combine, ("add_rows",)),
            (linear, ("few_rows", "few_rows_of_three", "many_rows")),
        )
    )


def noted_launches_of(kernels: Iterable[tuple[Any, Sequence[str]]]) -> list[Launch]:
    """Replace kernels, given by module and name; return the list of their launches."""
    launches: list[Launch] = []
    for module, names in kernels:
        for name in names:
            kernel = getattr(module, name)
            setattr(module, name, _Noted(getattr(kernel, "_kernel", kernel), launches))
    return launches


def launches_of(
    format_name: str,
    num_tokens: int,
    activation: NativeActivation | None,
    dtype: torch.dtype,
    *,
    has_matrix_units: bool = True,
) -> list[Launch]:
    """Return the launches of `TritonExperts` for two experts of this many tokens each."""
    launches = noted_launches()
    gated = activation is not RELU2
    layout = ExpertLayout(find_format(format_name), 2048, 768, gated, activation is CLAMPED)
    token = torch.zeros(2 * num_tokens, dtype=torch.int32)
    table = row_table([0, 0], [0, num_tokens, 2 * num_tokens], token)
    hidden, out = torch.zeros(2, 2048, dtype=dtype), torch.zeros(len(token), 2048)
    kernels = experts.TritonExperts(has_matrix_units=has_matrix_units)
    kernels.compute(
        layout, activation, hidden, table.on(table.memory), out, lambda rows: rows[:, :768]
    )
    if num_tokens == 1:
        kernels.add_rows(out, torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, 8), hidden)
    return launches


def compiled(launch: Launch, capability: int) -> Any:
    """Compile a launch, before 8.0 with fp16 for bf16; the compiler's errors are raised."""
    names, is_old = launch.kernel.arg_names, capability < 80
    constants = {k: v for k, v in launch.constants.items() if k not in _OPTIONS}
    constants = {k: "fp16" if is_old and v == "bf16" else v for k, v in constants.items()}
    pointers = _POINTERS | ({torch.bfloat16: "*fp16"} if is_old else {})
    constants |= {n: None for n, a in zip(names, launch.args, strict=False) if a is None}
    signature = {
        name: ("i32" if a < 1 << 31 else "i64") if isinstance(a, int) else pointers[a.dtype]
        for name, a in zip(names, launch.args, strict=False)
        if a is not None
    }
    signature |= dict.fromkeys(constants, "constexpr")
    # The launcher's specialisations: tensors start at multiples of 16 bytes, numbers may be
    # multiples of 16. Some arguments are excluded.
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, argument in enumerate(launch.args)
        if (isinstance(argument, Tensor) or (isinstance(argument, int) and argument % 16 == 0))
        and not launch.kernel.params[place].do_not_specialize_on_alignment
        and not launch.kernel.params[place].do_not_specialize
    }
    source = ASTSource(launch.kernel, signature, constants, aligned)
    options = {k: v for k, v in launch.constants.items() if k in _OPTIONS}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def spilled_bytes(cubin: bytes) -> int:
    """Return the bytes per thread that are spilled from registers to memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [_CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"STACK:(\d+) .*LOCAL:(\d+)", done.stdout + done.stderr)
    assert found is not None, done.stdout + done.stderr
    return int(found[1]) + int(found[2])


# format, tokens an expert, activation, dtype: every format in both regimes, every activation.
CASES: tuple[tuple[str, int, NativeActivation | None, torch.dtype], ...] = (
    ("int4", 1, SWIGLU, torch.bfloat16),
    ("mxfp4", 64, CLAMPED, torch.bfloat16),
    ("fp8", 2, SWIGLU, torch.float32),
    ("int4z", 129, SWIGLU, torch.bfloat16),
    ("int8", 16, None, torch.bfloat16),
    ("bf16", 32, SWIGLU, torch.bfloat16),
    ("fp16", 4, RELU2, torch.float16),
    # fp32 is for ordinary cores, whose tiles are another size.
    ("int8", 129, SWIGLU, torch.float32),
    ("bf16", 129, SWIGLU, torch.float32),
    ("int4z", 129, SWIGLU, torch.float32),
    ("int4", 64, SWIGLU, torch.float32),
    # Two planes of bits, super-blocks with and without minima, tables, factors of rows.
    ("q5_k", 2, SWIGLU, torch.bfloat16),
    ("q6_k", 129, SWIGLU, torch.bfloat16),
    ("iq4_xs", 8, SWIGLU, torch.bfloat16),
    ("q2_k", 64, SWIGLU, torch.bfloat16),
    ("iq2_xs", 1, SWIGLU, torch.bfloat16),
    ("nvfp4", 64, SWIGLU, torch.bfloat16),
    # The following are for a release or a new version of Triton, not for every change.
    ("mxfp4", 16, CLAMPED, torch.float32),
    ("bf16", 8, SWIGLU, torch.bfloat16),
    ("int4", 129, SWIGLU, torch.bfloat16),
    ("int4-g128", 4, RELU2, torch.float16),
    ("int4", 8, SWIGLU, torch.bfloat16),
    ("int4z-g64", 2, SWIGLU, torch.bfloat16),
    ("int8", 1, None, torch.bfloat16),
    ("int8-g32", 32, RELU2, torch.float16),
    ("mxfp4", 8, CLAMPED, torch.bfloat16),
    ("fp8", 16, SWIGLU, torch.bfloat16),
    ("fp8", 129, SWIGLU, torch.float32),
    ("bf16", 1, NativeActivation(ActivationKind.GELU_TANH_GATE), torch.bfloat16),
    ("bf16", 200, None, torch.bfloat16),
    ("fp16", 20, SWIGLU, torch.float32),
    ("fp16", 8, SWIGLU, torch.float32),
    ("q4_k", 1, SWIGLU, torch.bfloat16),
    ("q4_k", 8, SWIGLU, torch.bfloat16),
    ("q4_k", 129, SWIGLU, torch.bfloat16),
    ("q4_k", 129, SWIGLU, torch.float32),
    ("q5_k", 8, SWIGLU, torch.bfloat16),
    ("q5_k", 32, SWIGLU, torch.bfloat16),
    ("q5_k", 129, SWIGLU, torch.float32),
    ("q6_k", 1, SWIGLU, torch.bfloat16),
    ("q6_k", 64, SWIGLU, torch.float32),
    ("q2_k", 8, SWIGLU, torch.bfloat16),
    ("q2_k", 129, SWIGLU, torch.bfloat16),
    ("q3_k", 1, SWIGLU, torch.bfloat16),
    ("q3_k", 64, SWIGLU, torch.bfloat16),
    ("q3_k", 129, SWIGLU, torch.float32),
    ("int5", 4, SWIGLU, torch.float16),
    ("int5z", 16, SWIGLU, torch.float16),
    ("iq4_nl", 1, SWIGLU, torch.bfloat16),
    ("iq4_nl", 64, SWIGLU, torch.bfloat16),
    ("iq4_xs", 129, SWIGLU, torch.bfloat16),
    ("iq4_xs", 129, SWIGLU, torch.float32),
    ("iq3_s", 2, SWIGLU, torch.bfloat16),
    ("iq3_xxs", 32, SWIGLU, torch.bfloat16),
    ("iq2_xxs", 64, SWIGLU, torch.bfloat16),
    ("iq2_s", 8, SWIGLU, torch.bfloat16),
    ("iq1_s", 129, SWIGLU, torch.bfloat16),
    ("iq1_m", 2, SWIGLU, torch.bfloat16),
    ("iq2_xs", 129, SWIGLU, torch.float32),
    ("nvfp4", 1, CLAMPED, torch.bfloat16),
    ("nvfp4", 8, SWIGLU, torch.bfloat16),
    ("nvfp4", 129, SWIGLU, torch.float32),
)


def results(capabilities: list[int], num_cases: int) -> Iterator[dict[str, Any]]:
    """Compile the cases, each for one of the GPU generations in turn; yield the results."""
    for number, (name, num_tokens, activation, dtype) in enumerate(CASES[:num_cases]):
        capability = capabilities[number % len(capabilities)]
        is_new = capability >= 80
        for launch in launches_of(name, num_tokens, activation, dtype, has_matrix_units=is_new):
            yield result_of(str((name, num_tokens, str(dtype))), launch, capability)


def result_of(case: str, launch: Launch, capability: int) -> dict[str, Any]:
    """Compile a launch; return the result."""
    binary = compiled(launch, capability)
    ptx = binary.asm["ptx"]
    return {
        "case": case, "kernel": launch.kernel.__name__,
        "sm": capability, "shared_bytes": binary.metadata.shared,
        "cubin_bytes": len(binary.asm["cubin"]),
        "spilled_bytes": spilled_bytes(binary.asm["cubin"]),
        "wide_loads": ptx.count("ld.global.v4") + ptx.count("cp.async.cg"),
        "matrix_units": ptx.count("mma"),
    }  # fmt: skip


def unlike(capabilities: list[int]) -> Iterator[dict[str, Any]]:
    """Yield, per kernel and token count, whether the GPUs' LLVM code differs."""
    for num_tokens in (1, 129):
        for launch in launches_of("int4", num_tokens, SWIGLU, torch.bfloat16):
            binaries = [compiled(launch, capability) for capability in capabilities]
            # Not the lines at the end, which name the kernel's file.
            codes = {binary.asm["llir"].partition("\n!")[0] for binary in binaries}
            yield {"kernel": launch.kernel.__name__, "is_unlike": len(codes) > 1}


if __name__ == "__main__":
    if sys.argv[1] == "--unlike":
        print(json.dumps(list(unlike([int(argument) for argument in sys.argv[2:]]))))
        sys.exit()
    *capabilities, num_cases = [int(argument) for argument in sys.argv[1:]]
    print(json.dumps(list(results(capabilities, num_cases))))
