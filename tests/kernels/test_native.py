"""Tests of the native kernels against the torch reference: formats, shapes, instruction sets.

The reference multiplies the unpacked weights in fp32. The kernels round activations (int8 per
group, or bf16), so errors are measured relative to the result.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tandem.core.errors import ConfigError
from tandem.kernels import _native
from tandem.kernels.activations import apply_activation
from tandem.kernels.cpu import usable_topology
from tandem.kernels.engine import start_engine
from tandem.kernels.formats.weight_format import find_format
from tandem.kernels.native import ActivationKind, NativeActivation, compute_experts_with
from tests.kernels.layers import SILU, Layer, make_layer, relative_error

FORMATS = ["bf16", "fp16", "fp8", "int8-g128", "int8-g32", "int4-g32", "int4-g64", "int4-g128",
           "int4z-g32", "int4z-g128", "mxfp4", "q4_k", "q5_k", "q6_k", "int5-g32", "int5z-g32",
           "iq4_nl", "iq4_xs", "nvfp4", "q2_k", "q3_k", "iq3_xxs", "iq3_s", "iq2_xxs",
           "iq2_xs", "iq2_s", "iq1_s", "iq1_m"]  # fmt: skip
# Relative error of an output, from the rounding of activations alone (docs/formats.md).
TOLERANCE = {"bf16": 0.01, "fp16": 1e-5, "fp8": 0.01, "g32": 0.025, "g64": 0.03, "g128": 0.035}
SMALL_GROUPS = 0.025  # of 16 or 32 columns
ACTIVATIONS = {
    "silu": SILU,
    "gelu": NativeActivation(ActivationKind.GELU_TANH_GATE),
    "clamped": NativeActivation(ActivationKind.SWIGLU, 1.702, 0.5, 1.0),
    "relu2": NativeActivation(ActivationKind.RELU2),
    "limited": NativeActivation(ActivationKind.LIMITED_SILU, limit=0.5),
    "softcapped": NativeActivation(ActivationKind.SOFTCAPPED, 0.7, 1.3),
}


def route(*tokens_per_expert: int, num_tokens: int = 0) -> list[list[int]]:
    """Return routing that gives each expert its first tokens, rotated by its number."""
    num_tokens = num_tokens or max(tokens_per_expert)
    return [[(i + t) % num_tokens for t in range(n)] for i, n in enumerate(tokens_per_expert)]


def check(
    fmt: str,
    rows: list[list[int]],
    *,
    isa: str = "",
    activation: str = "silu",
    has_bias: bool = False,
    hidden: int = 128,
    inner: int = 128,
) -> None:
    layer = make_layer(
        find_format(fmt), hidden, inner, rows, activation=ACTIVATIONS[activation], has_bias=has_bias
    )
    found = layer.compute(start_engine(num_threads=2, isa=isa))
    expected = layer.expected(is_rounded=False)
    name = find_format(fmt).name
    tolerance = TOLERANCE.get(name, TOLERANCE.get(name.rpartition("-")[2], SMALL_GROUPS))
    for expert, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert relative_error([ours], [theirs]) < tolerance, expert


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_on_every_instruction_set(fmt: str, isa: str) -> None:
    check(fmt, route(3, 1, 0, 2, num_tokens=5), isa=isa)


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize(
    "fmt", ["bf16", "int4-g32", "int8-g128", "q4_k", "q6_k", "iq4_xs", "nvfp4", "iq3_s", "iq2_xs"]
)
def test_any_number_of_tokens(fmt: str, isa: str) -> None:
    for num_tokens in (1, 2, 3, 4, 7, 8, 9, 16, 37):
        check(fmt, route(num_tokens, num_tokens), isa=isa)


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_activation(activation: str, has_bias: bool, isa: str) -> None:
    check("int8-g32", route(2, 9), isa=isa, activation=activation, has_bias=has_bias)


@pytest.mark.parametrize(
    ("hidden", "inner"), [(16, 16), (40, 24), (72, 200), (576, 1536), (8, 120)]
)
@pytest.mark.parametrize(
    "fmt", ["bf16", "int4-g32", "int4-g128", "mxfp4", "q5_k", "q6_k", "q2_k", "nvfp4", "iq2_xxs"]
)
def test_sizes_that_are_not_whole_blocks_or_groups(fmt: str, hidden: int, inner: int) -> None:
    check(fmt, route(1, 5), hidden=hidden, inner=inner, has_bias=True)


def test_no_rows_is_no_work() -> None:
    layer = make_layer(find_format("int4-g32"), 32, 32, [[], []])
    found = layer.compute(start_engine(num_threads=2))
    assert [rows.shape for rows in found] == [(0, 32), (0, 32)]


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("fmt", ["int4-g32", "int8-g128", "int4z-g128", "bf16", "fp16", "fp8"])
def test_a_row_does_not_depend_on_its_company_or_on_threads(fmt: str, isa: str) -> None:
    layer = make_layer(find_format(fmt), 640, 64, route(11, 11, 11, 11))
    together = layer.compute(start_engine(num_threads=3, isa=isa))
    alone = start_engine(num_threads=1, isa=isa)
    for expert, row in (divmod(row, 11) for row in range(0, 44, 5)):
        rows: list[list[int]] = [[] for _ in layer.rows]
        rows[expert] = [0]
        hidden = layer.hidden[layer.rows[expert][row], None]
        one = replace(layer, rows=rows, hidden=hidden).compute(alone)[expert]
        assert torch.equal(one[0], together[expert][row])


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("fmt", ["int4-g32", "bf16", "int8-g128"])
def test_an_activation_in_torch_gives_what_the_native_one_gives(fmt: str, is_gated: bool) -> None:
    activation, rows = ACTIVATIONS["silu" if is_gated else "relu2"], route(9, 0, 5, 1)
    layer = make_layer(find_format(fmt), 96, 100, rows, activation=activation, has_bias=True)
    engine = start_engine(num_threads=2)
    expected = torch.cat(layer.compute(engine))
    out = torch.empty_like(expected)
    compute_experts_with(
        engine, layer.layout, layer.addresses(), partial(apply_activation, activation),
        layer.hidden, *layer.begins_and_tokens(), out,
    )  # fmt: skip
    assert (out - expected).norm() <= 2e-3 * expected.norm()


def test_rows_add_up_in_the_routers_order() -> None:
    rows, weights = torch.randn(50, 33), torch.rand(20, 3)
    row_of = torch.randint(-1, 50, (20, 3), dtype=torch.int32)
    found, expected = torch.empty(20, 33), torch.zeros(20, 33)
    start_engine(num_threads=2).add_rows(rows, row_of, weights, found)
    for k in range(3):
        chosen = row_of[:, k] >= 0
        expected[chosen] += rows[row_of[chosen, k].long()] * weights[chosen, k, None]
    assert torch.equal(found, expected)


def test_many_calls_from_a_pool_that_sleeps_in_between() -> None:
    layer = make_layer(find_format("int8-g32"), 64, 32, route(6, 2, 4, 1))
    engine = start_engine(num_threads=4)
    expected = torch.cat(layer.compute(engine))
    for _ in range(500):
        assert torch.equal(torch.cat(layer.compute(engine)), expected)


def test_extreme_activations_stay_finite() -> None:
    layer = make_layer(find_format("int4-g32"), 64, 32, route(4, 4, 4, 4))
    layer.hidden.mul_(torch.tensor([[0.0], [1e-30], [1e4], [1.0]]))
    rows = torch.cat(layer.compute(start_engine(num_threads=1)))
    assert torch.isfinite(rows).all()
    assert torch.equal(rows[0], torch.zeros(64))


def test_unknown_instruction_set_names_those_that_are_there() -> None:
    with pytest.raises(ConfigError, match="'avx513' is not on this processor"):
        start_engine(num_threads=1, isa="avx513")


def test_several_python_threads_take_turns() -> None:
    layer, engine = (
        make_layer(find_format("int4-g32"), 640, 64, [[0]]),
        start_engine(num_threads=2),
    )
    calls = [
        replace(layer, rows=[list(range(n))], hidden=torch.randn(n, 640)) for n in (1, 3, 11, 40)
    ]

    def compute(layer: Layer) -> Tensor:
        return torch.cat(layer.compute(engine))

    expected = [compute(call) for call in calls]
    with ThreadPoolExecutor(len(calls)) as threads:
        for _ in range(50):
            found = list(threads.map(compute, calls))
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="threads are bound on Linux only")
def test_workers_are_bound_and_the_caller_is_not() -> None:
    before, mine = set(os.listdir("/proc/self/task")), os.sched_getaffinity(0)
    engine = start_engine(num_threads=3)
    workers = [int(task) for task in set(os.listdir("/proc/self/task")) - before]
    assert len(workers) == engine.num_threads - 1
    assert all(
        os.sched_getaffinity(worker) == set(usable_topology().places(3)) for worker in workers
    )
    assert os.sched_getaffinity(0) == mine
