"""Triton's real launch path without a card: python -m tests.kernels.launch_triton 89 120

Its driver here compiles what is launched for a GPU, makes the launcher's source, and does nothing.
So what only a launch shows is shown: arguments that the binder refuses, constants that a kernel is
not specialised for, code that the compiler refuses. Tensors are the host's, whose pointers nobody
follows.
"""

import collections
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver as active

from tandem.devices.cuda import handing
from tandem.kernels.attention import AttentionForm
from tandem.kernels.dense import pack_dense
from tandem.kernels.formats import ExpertLayout, find_format
from tandem.kernels.native import ActivationKind, NativeActivation
from tandem.triton_kernels import chains, dense, operations, variants
from tandem.triton_kernels.decode_attention import DecodeAttention
from tandem.triton_kernels.experts import TritonExperts

CPU = torch.device("cpu")
HIDDEN, INTERMEDIATE, TOP_K, EXPERTS = 2048, 768, 8, 128
SWIGLU = NativeActivation(ActivationKind.SWIGLU)
_FEWEST_MATRIX = 80
_LAYERS = 0, 1, 15  # whose numbers, 1 more, Triton would tell apart: 1, a multiple of 16, others
launched = collections.Counter[str]()
compiled = collections.Counter[str]()


class _Utilities:
    """What Triton asks of the driver about a kernel and a card."""

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, ...]:
        return 1, 2, 64, 0, 1024  # module, function, registers, spills, threads

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 101376, "multiprocessor_count": 128}

    def set_printf_fifo_size(self, size: int) -> None:
        """Nothing is printed."""


class _Launcher:
    """Makes a launcher's source as for a card; a launch is counted."""

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
    """A driver of Triton's for a GPU that is none."""

    launcher_cls = _Launcher
    utils = _Utilities()

    def __init__(self, capability: int) -> None:
        """Compile for `sm_{capability}`."""
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CPU

    def map_python_to_cpp_type(self, name: str) -> str:
        return str(nvidia.ty_to_cpp(name))


def cases(capability: int, *, is_short: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Return what decode steps and prompts launch, by name; `is_short` for one format."""
    dtype = torch.bfloat16 if capability >= _FEWEST_MATRIX else torch.float16
    for name in ("int4",) if is_short else ("int4", "int8", "mxfp4", "bf16"):
        layout = ExpertLayout(
            find_format(name), HIDDEN, INTERMEDIATE, is_gated=True, has_bias=name == "mxfp4"
        )
        experts = TritonExperts(has_matrix_units=capability >= _FEWEST_MATRIX)
        works = variants.variants(
            experts, layout, SWIGLU, lambda x: x, dtype=dtype, top_k=TOP_K, device=CPU
        )
        for number, work in enumerate(works):
            yield f"experts in {name}, {number}", work
    yield "small operations", lambda: _small(dtype)
    yield "a chain", lambda: _chain(dtype)
    for rows in (1, 2, 8):
        for inside in (False, True):
            yield (
                f"a hand-over of {rows}",
                lambda rows=rows, inside=inside: _hand(  # type: ignore[misc]
                    rows, dtype, is_inside=inside
                ),
            )
    yield "packed linear layers", lambda: _linear(dtype)
    yield "attention", lambda: _attend(dtype, has_small_tiles=capability < _FEWEST_MATRIX)


def _small(dtype: torch.dtype) -> None:
    hidden, table = (torch.zeros(2, 1, n, dtype=dtype) for n in (HIDDEN, 128))
    queries, keys = (torch.zeros(2, n, 1, 128, dtype=dtype) for n in (8, 2))
    weight = torch.ones(HIDDEN)
    operations.norm(hidden, weight, 1e-6, True)
    operations.add_and_norm(hidden, hidden, weight, 1e-6, False)
    operations.rotate(queries, table, table, 1)
    operations.rotate_two(queries, keys, table, table, 1)
    operations.choose(torch.zeros(2, EXPERTS), TOP_K, 1.0, True, torch.float32)


def _chain(dtype: torch.dtype) -> None:
    x, bias = torch.zeros(2, 1, 32, dtype=dtype), torch.zeros(32)
    chain = chains.Chain((0, 8, 3, 9), (0, 3, 4, 2), (0, 1, 4, 5), (0, 0, 0, 0), ())
    chains.chain([x, bias, bias], chain, x.shape, torch.float32)


def _hand(rows: int, dtype: torch.dtype, *, is_inside: bool) -> None:
    pairs = rows * TOP_K
    words, index = torch.zeros(pairs, dtype=torch.int32), torch.zeros(rows, TOP_K).long()
    weights, hidden = torch.zeros(rows, TOP_K), torch.zeros(rows, HIDDEN, dtype=dtype)
    results = torch.zeros(pairs, HIDDEN)
    waits = handing.WaitWords(words[:1], words[:1])
    box = handing.MailboxTensors(
        words[:1], words[:1], words, words, weights, hidden, results, waits
    )
    table = torch.zeros(EXPERTS, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        # Barriers, pauses and clocks are a GPU's own, and left out for tensors of the host.
        patch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
        addresses = handing.publish(box, table, hidden, index, weights, rings=is_inside)
        for layer in _LAYERS:
            handing.combine(
                box, results, addresses, index, weights, EXPERTS, hidden,
                layer=layer, wait_seconds=1.0 * is_inside,
            )  # fmt: skip


def _linear(dtype: torch.dtype) -> None:
    weight = pack_dense(torch.zeros(512, HIDDEN), None, find_format("int8"))
    for rows in (1, 8, 40):
        dense.multiply(torch.zeros(rows, HIDDEN, dtype=dtype), dense.bring(weight, CPU))


def _attend(dtype: torch.dtype, *, has_small_tiles: bool) -> None:
    form = AttentionForm(
        num_heads=32, num_kv_heads=4, key_dim=128, value_dim=128, scale=0.1, window=0
    )
    queries, keys = (torch.zeros(n, 2, 128, dtype=dtype) for n in (32, 4))
    places = torch.zeros(2, dtype=torch.int64)
    kind = "bf16" if dtype == torch.bfloat16 else "fp16"
    where = torch.zeros(5, dtype=torch.int64)
    attend = DecodeAttention(128, has_small_tiles=has_small_tiles)
    attend(form, where, places, places, queries, keys, keys, None, kind)


def main(capabilities: list[int], *, is_short: bool) -> int:
    """Launch all cases for each capability; return how many fail."""
    num_failed = 0
    for capability in capabilities:
        active.set_active(NoCard(capability))
        for name, work in cases(capability, is_short=is_short):
            try:
                work()
            except Exception as error:  # Triton's compilers and tools raise what they like
                num_failed += 1
                print(f"sm_{capability}: {name}: {type(error).__name__}: {error}"[:400], flush=True)
    print("launched", *(f"{name}:{count}" for name, count in sorted(launched.items())))
    print("compiled", *(f"{name}:{count}" for name, count in sorted(compiled.items())))
    return num_failed


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(min(1, main([int(x) for x in given if x != "--short"], is_short="--short" in given)))
