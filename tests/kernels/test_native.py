"""The native kernels against the torch reference: formats, shapes, instruction sets, token counts.

The reference multiplies the unpacked weights in fp32. What differs is the rounding of activations
(int8 per group, or bf16), so errors are measured against the size of the result.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tandem.core.errors import ConfigError
from tandem.kernels import _native
from tandem.kernels.activations import apply_activation
from tandem.kernels.cpu import usable_topology
from tandem.kernels.engine import start_engine
from tandem.kernels.formats.expert import ExpertLayout, unpack_expert
from tandem.kernels.formats.weight_format import find_format
from tandem.kernels.native import ActivationKind, NativeActivation, NativeExperts
from tandem.kernels.reference import expert_ffn
from tests.kernels.formats.sources import pack_expert

FORMATS = ["bf16", "fp16", "fp8", "int8-g128", "int8-g32", "int4-g32", "int4-g64", "int4-g128",
           "int4z-g32", "int4z-g128", "mxfp4", "q4_k", "q5_k", "q6_k", "int5-g32", "int5z-g32",
           "iq4_nl", "iq4_xs", "nvfp4", "q2_k", "q3_k", "iq3_xxs", "iq3_s", "iq2_xxs",
           "iq2_xs"]  # fmt: skip
# Relative error of an output, from the rounding of activations alone (docs/formats.md).
TOLERANCE = {
    "bf16": 0.01,
    "fp16": 1e-5,
    "fp8": 0.01,
    "g32": 0.025,
    "g64": 0.03,
    "g128": 0.035,
}
SMALL_GROUPS = 0.025  # of 16 or 32 columns
NUM_EXPERTS = 4
SILU = NativeActivation(ActivationKind.SWIGLU)


def silu_gate(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def gelu_gate(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def clamped_swiglu(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def relu2(rows: Tensor) -> Tensor:
    return torch.relu(rows).square()


ACTIVATIONS = {
    "silu": (SILU, silu_gate),
    "gelu": (NativeActivation(ActivationKind.GELU_TANH_GATE), gelu_gate),
    "clamped": (NativeActivation(ActivationKind.SWIGLU, 1.702, 0.5, 1.0), clamped_swiglu),
    "relu2": (NativeActivation(ActivationKind.RELU2), relu2),
}


def make_store(layout: ExpertLayout) -> Tensor:
    torch.manual_seed(0)
    store = torch.empty(NUM_EXPERTS, layout.num_bytes, dtype=torch.uint8)
    hidden, inner = layout.hidden_size, layout.intermediate_size
    up_rows = inner * (1 + layout.is_gated)
    for buffer in store:
        pack_expert(
            layout,
            torch.randn(up_rows, hidden) / hidden**0.5,
            torch.randn(hidden, inner) / inner**0.5,
            torch.randn(up_rows) * 0.1 if layout.has_bias else None,
            torch.randn(hidden) * 0.1 if layout.has_bias else None,
            out=buffer,
        )
    return store


def route(tokens_per_expert: list[int], num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return experts, row_begin and row_token; expert i takes its first tokens, rotated by i."""
    counts = torch.tensor(tokens_per_expert)
    rows = [[(i + t) % num_tokens for t in range(n)] for i, n in enumerate(tokens_per_expert)]
    begin = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    token = torch.tensor([t for row in rows for t in row], dtype=torch.int32)
    return torch.arange(len(counts)), begin.int(), token


def check(
    fmt: str,
    *,
    tokens_per_expert: list[int],
    num_tokens: int,
    isa: str = "",
    activation: str = "silu",
    has_bias: bool = False,
    hidden: int = 128,
    inner: int = 128,
    num_threads: int = 2,
) -> None:
    native, torch_activation = ACTIVATIONS[activation]
    layout = ExpertLayout(find_format(fmt), hidden, inner, native.is_gated, has_bias)
    store = make_store(layout)
    x = torch.randn(num_tokens, hidden)
    experts, begin, token = route(tokens_per_expert, num_tokens)
    engine = NativeExperts(num_threads=num_threads, isa=isa)
    actual = engine.compute(layout, store, native, x, experts, begin, token)
    for e in experts.tolist():
        chosen = slice(int(begin[e]), int(begin[e + 1]))
        rows = x[token[chosen].long()]
        expected = expert_ffn(rows, unpack_expert(layout, store[e]), torch_activation)
        error = (actual[chosen] - expected).norm() / expected.norm().clamp(min=1e-9)
        kind = find_format(fmt).name
        assert error < TOLERANCE.get(kind, TOLERANCE.get(kind.rpartition("-")[2], SMALL_GROUPS)), e


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_on_every_instruction_set(fmt: str, isa: str) -> None:
    check(fmt, isa=isa, tokens_per_expert=[3, 1, 0, 2], num_tokens=5)


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 7, 8, 9, 16, 37])
@pytest.mark.parametrize(
    "fmt", ["bf16", "int4-g32", "int8-g128", "q4_k", "q6_k", "iq4_xs", "nvfp4"]
)
def test_any_number_of_tokens(fmt: str, num_tokens: int, isa: str) -> None:
    check(fmt, isa=isa, tokens_per_expert=[num_tokens] * 2, num_tokens=num_tokens)


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_activation(activation: str, has_bias: bool, isa: str) -> None:
    check("int8-g32", isa=isa, activation=activation, has_bias=has_bias,
          tokens_per_expert=[2, 9], num_tokens=9)  # fmt: skip


@pytest.mark.parametrize(
    ("hidden", "inner"), [(16, 16), (40, 24), (72, 200), (576, 1536), (8, 120)]
)
@pytest.mark.parametrize(
    "fmt", ["bf16", "int4-g32", "int4-g128", "mxfp4", "q5_k", "q6_k", "q2_k", "nvfp4"]
)
def test_sizes_that_are_not_whole_blocks_or_groups(fmt: str, hidden: int, inner: int) -> None:
    check(fmt, hidden=hidden, inner=inner, has_bias=True, tokens_per_expert=[1, 5], num_tokens=5)


def test_no_rows_is_no_work() -> None:
    layout = ExpertLayout(find_format("int4-g32"), 32, 32, True, False)
    experts, begin, token = route([0, 0], 3)
    engine = NativeExperts(num_threads=2)
    rows = engine.compute(
        layout, make_store(layout), SILU, torch.randn(3, 32), experts, begin, token
    )
    assert rows.shape == (0, 32)


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("fmt", ["int4-g32", "int8-g128", "int4z-g128", "bf16", "fp16", "fp8"])
def test_a_row_does_not_depend_on_its_company_or_on_threads(fmt: str, isa: str) -> None:
    layout = ExpertLayout(find_format(fmt), 640, 64, True, False)
    store, x = make_store(layout), torch.randn(11, 640)
    together = NativeExperts(num_threads=3, isa=isa).compute(
        layout, store, SILU, x, *route([11, 11, 11, 11], 11)
    )
    alone = NativeExperts(num_threads=1, isa=isa)
    experts, _, token = route([11, 11, 11, 11], 11)
    for row in range(0, 44, 5):
        expert = row // 11
        one = alone.compute(
            layout, store, SILU, x[token[row], None], experts[expert, None],
            torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32),
        )  # fmt: skip
        assert torch.equal(one[0], together[row])


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("fmt", ["int4-g32", "bf16", "int8-g128"])
def test_an_activation_in_torch_gives_what_the_native_one_gives(fmt: str, is_gated: bool) -> None:
    layout = ExpertLayout(find_format(fmt), 96, 100, is_gated, has_bias=True)
    store, engine = make_store(layout), NativeExperts(num_threads=2)
    kind = ActivationKind.SWIGLU if is_gated else ActivationKind.RELU2
    activation = NativeActivation(kind)
    x = torch.randn(9, 96)
    experts, begin, token = route([9, 0, 5, 1], 9)
    expected = engine.compute(layout, store, activation, x, experts, begin, token)
    out = torch.empty_like(expected)
    addresses = store.data_ptr() + experts * layout.num_bytes
    engine.compute_with(
        layout, addresses, lambda rows: apply_activation(activation, rows), x, begin, token, out
    )
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
    layout = ExpertLayout(find_format("int8-g32"), 64, 32, True, False)
    store, engine = make_store(layout), NativeExperts(num_threads=4)
    x = torch.randn(6, 64)
    arguments = (layout, store, SILU, x, *route([6, 2, 4, 1], 6))
    expected = engine.compute(*arguments)
    for _ in range(500):
        assert torch.equal(engine.compute(*arguments), expected)


def test_extreme_activations_stay_finite() -> None:
    layout = ExpertLayout(find_format("int4-g32"), 64, 32, True, False)
    x = torch.randn(4, 64) * torch.tensor([[0.0], [1e-30], [1e4], [1.0]])
    rows = NativeExperts(num_threads=1).compute(
        layout, make_store(layout), SILU, x, *route([4, 4, 4, 4], 4)
    )
    assert torch.isfinite(rows).all()
    assert torch.equal(rows[0], torch.zeros(64))


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("fmt", ["bf16", "int4-g32", "int8-g128"])
def test_what_is_not_finite_comes_out_and_stays_in_its_row(
    fmt: str, value: float, isa: str
) -> None:
    layout = ExpertLayout(find_format(fmt), 128, 128, True, False)
    x = torch.randn(3, 128)
    x[1, 40] = value
    experts, begin, token = route([3, 3], 3)
    rows = NativeExperts(num_threads=1, isa=isa).compute(
        layout, make_store(layout), SILU, x, experts, begin, token
    )
    is_finite = torch.isfinite(rows).all(dim=1)
    assert torch.equal(is_finite, token != 1)


def test_unknown_instruction_set_names_those_that_are_there() -> None:
    with pytest.raises(ConfigError, match="'avx513' is not on this processor"):
        NativeExperts(num_threads=1, isa="avx513")


def test_several_python_threads_take_turns() -> None:
    layout = ExpertLayout(find_format("int4-g32"), 640, 64, True, False)
    store, engine = make_store(layout), NativeExperts(num_threads=2)
    inputs = [torch.randn(tokens, 640) for tokens in (1, 3, 11, 40)]

    def compute(x: Tensor) -> Tensor:
        return engine.compute(layout, store, SILU, x, *route([len(x)] * NUM_EXPERTS, len(x)))

    expected = [compute(x) for x in inputs]
    with ThreadPoolExecutor(len(inputs)) as threads:
        for _ in range(50):
            found = list(threads.map(compute, inputs))
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="threads are bound on Linux only")
def test_workers_are_bound_and_the_caller_is_not() -> None:
    before, mine = set(os.listdir("/proc/self/task")), os.sched_getaffinity(0)
    engine = NativeExperts(num_threads=3)
    workers = [int(task) for task in set(os.listdir("/proc/self/task")) - before]
    assert len(workers) == engine.num_threads - 1
    assert all(
        os.sched_getaffinity(worker) == set(usable_topology().places(3)) for worker in workers
    )
    assert os.sched_getaffinity(0) == mine
