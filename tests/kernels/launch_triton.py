"""Triton's real launch path without a card: python -m tests.kernels.launch_triton 89 120

The driver here compiles each launched kernel for a GPU, builds the launcher's source, and runs
nothing. So it finds what only a launch finds: arguments that the binder refuses, constants without
a specialisation, code that the compiler refuses. Tensors are in host memory, and their pointers are
not read.
"""

import collections
import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver as active
from triton.runtime.jit import JITFunction

from tandem import triton_kernels
from tandem.kernels.formats import FORMATS, ExpertLayout, find_format
from tandem.kernels.formats.weight_format import WeightFormat
from tandem.kernels.native import ActivationKind, NativeActivation
from tandem.triton_kernels import variants
from tandem.triton_kernels.experts import TritonExperts
from tandem.triton_kernels.rows import VECTOR_TOKENS
from tests.kernels import compile_triton_steps as steps

CPU = torch.device("cpu")
HIDDEN, INTERMEDIATE, TOP_K = 2048, 768, 8
SWIGLU = NativeActivation(ActivationKind.SWIGLU)
_FEWEST_MATRIX = 80
# For these GPUs kernels without matrix units become the same LLVM code (`test_triton.py`): each
# format is compiled for one of them.
_BY_TURNS = 89, 90, 120
_LAYERS = 0, 1, 15  # sizes that, plus 1, Triton would distinguish: 1, a multiple of 16, others
launched = collections.Counter[str]()
compiled = collections.Counter[str]()


class _Utilities:
    """Answers Triton's queries about a kernel and a card."""

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, ...]:
        return 1, 2, 64, 0, 1024  # module, function, registers, spills, threads

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 101376, "multiprocessor_count": 128}

    def set_printf_fifo_size(self, size: int) -> None:
        """Do nothing."""


class _Launcher:
    """Builds a launcher's source as for a card, and counts the launches."""

    def __init__(self, source: Any, metadata: Any) -> None:
        names = source.fn.arg_names
        constants = {
            (names.index(key),) if isinstance(key, str) else key: value
            for key, value in source.constants.items()
        }
        signature = dict(enumerate(source.signature.values()))
        code = nvidia.make_launcher(
            constants, signature, getattr(metadata, "tensordesc_meta", None)
        )
        assert "launch" in code
        self._name = source.fn.__name__
        compiled[self._name] += 1

    def __call__(self, *args: Any, **options: Any) -> None:
        launched[self._name] += 1


class NoCard:
    """A Triton driver for a simulated GPU."""

    launcher_cls = _Launcher
    utils = _Utilities()

    def __init__(self, capability: int) -> None:
        """Compile for `sm_{capability}`."""
        self._target = GPUTarget("cuda", capability, 32)
        self._number = capability  # Triton caches compiled kernels, with their keys, by device

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CPU

    def map_python_to_cpp_type(self, name: str) -> str:
        return str(nvidia.ty_to_cpp(name))


def cases(capability: int, *, is_short: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Return named launches of decode steps and prompts; with `is_short` one of each kind."""
    dtype = torch.bfloat16 if capability >= _FEWEST_MATRIX else torch.float16
    most = 1 if is_short else None
    formats = _formats(capability, is_short=is_short)
    for fmt, is_whole in formats:
        layout = ExpertLayout(
            fmt, HIDDEN, INTERMEDIATE, is_gated=True, has_bias=fmt.name == "mxfp4"
        )
        experts = TritonExperts(has_matrix_units=capability >= _FEWEST_MATRIX)
        works = variants.variants(
            experts, layout, SWIGLU, lambda x: x, dtype=dtype, top_k=TOP_K, device=CPU
        )
        first = 0 if is_whole else len(VECTOR_TOKENS)
        for number, work in enumerate(works[first:], first):
            yield f"experts in {fmt.name}, {number}", work
    for rows in (1, 2, 4, 8):  # of several sequences, or of one's drafts
        for wait_seconds in (0.0, 1.0):
            yield f"a hand-over of {rows}", partial(_hand, rows, dtype, wait_seconds)
    for fmt, is_whole in formats:
        for rows in (1, 8, 40) if is_whole else (40,):
            name = f"{rows} rows by a linear layer in {fmt.name}"
            yield name, partial(steps.multiply, fmt.name, rows)
    for small in steps.SMALL[:most]:
        yield f"small operations {small}", partial(steps.do_small, *small)
    yield "chains", partial(steps.do_chains, 8)
    yield "streams", partial(steps.mix, dtype)
    yield "an indexer", partial(steps.select, dtype)
    yield "compression", partial(steps.compress, *steps.COMPRESSIONS[0])
    for attend, given in ((steps.attend, steps.CASES), (steps.attend_in_windows, steps.WINDOWS)):
        yield from (
            (f"{attend.__name__} {x}", partial(attend, x, capability)) for x in given[:most]
        )
    for form in steps.STATES[:most]:
        yield f"states {form}", partial(steps.advance, form)


def _formats(capability: int, *, is_short: bool) -> list[tuple[WeightFormat, bool]]:
    """Return formats, and whether it is this GPU's turn for each of them."""
    if is_short:
        return [(find_format("int4"), True)]
    turn = _BY_TURNS.index(capability) if capability in _BY_TURNS else None
    return [(fmt, turn in (None, place % len(_BY_TURNS))) for place, fmt in enumerate(FORMATS)]


def never_launched() -> set[str]:
    """Return Tandem's kernels that no case has launched."""
    found = {
        name: each
        for info in pkgutil.iter_modules(triton_kernels.__path__, "tandem.triton_kernels.")
        for name, each in vars(importlib.import_module(info.name)).items()
        if isinstance(each, JITFunction)
    }
    inside = {name for each in found.values() for name in re.findall(r"\w+(?=\()", each.src)[1:]}
    return set(found) - inside - set(launched)


def _hand(rows: int, dtype: torch.dtype, wait_seconds: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Barriers, pauses and clocks exist on a GPU only, and are omitted for host tensors.
        patch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
        steps.hand_layers_over(rows, dtype, layers=_LAYERS, wait_seconds=wait_seconds)


def main(capabilities: list[int], *, is_short: bool) -> int:
    """Launch all cases for each capability; return the number of failures."""
    num_failed = 0
    for capability in capabilities:
        active.set_active(NoCard(capability))
        for name, work in cases(capability, is_short=is_short):
            try:
                work()
            except Exception as error:  # Triton's compilers and tools raise arbitrary exceptions
                num_failed += 1
                print(f"sm_{capability}: {name}: {type(error).__name__}: {error}"[:400], flush=True)
    for name in sorted(never_launched()):
        num_failed += 1
        print(f"{name}: nothing has launched it", flush=True)
    print("launched", *(f"{name}:{count}" for name, count in sorted(launched.items())))
    print("compiled", *(f"{name}:{count}" for name, count in sorted(compiled.items())))
    return num_failed


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(min(1, main([int(x) for x in given if x != "--short"], is_short="--short" in given)))
