"""Tests of random layers on every instruction set of this machine, against `layers`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.errors import ModelError
from tandem.kernels import _native
from tandem.kernels.engine import start_engine
from tandem.kernels.formats.weight_format import FORMATS, WeightFormat, find_format
from tandem.kernels.native import ActivationKind, NativeActivation, compute_experts
from tests.kernels.layers import SILU, Layer, make_layer, relative_error

ISAS = _native.available_isas()
ENGINES = {isa: start_engine(num_threads=2, isa=isa) for isa in ISAS}
ACTIVATIONS = [
    SILU,
    NativeActivation(ActivationKind.GELU_TANH_GATE),
    NativeActivation(ActivationKind.SWIGLU, 1.702, 0.7, 1.0),
    NativeActivation(ActivationKind.RELU2),
    NativeActivation(ActivationKind.LIMITED_SILU, limit=0.7),
    NativeActivation(ActivationKind.SOFTCAPPED, 0.7, 1.3),
]
# Products of the portable kernels that an example may take: a few hundredths of a second.
MAX_PRODUCTS = 20_000_000


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    sizes = st.sampled_from([16, 48, 100, 128, 576]) | st.integers(1, 200)
    hidden, inner = draw(sizes), draw(sizes)
    if draw(st.integers(0, 9)) == 0:
        hidden, inner = draw(st.sampled_from([(576, 1408), (1408, 48), (2880, 100), (48, 2880)]))
    counts = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 30, 64, 70, 130, 300])
    most = max(1, MAX_PRODUCTS // (hidden * inner * 3))
    spread = draw(st.lists(counts, min_size=1, max_size=4))
    num_tokens = draw(st.integers(1, 300))
    rows = [
        [(7 * i + expert) % num_tokens for i in range(min(count, most // len(spread)))]
        for expert, count in enumerate(spread)
    ]
    return make_layer(
        draw(st.sampled_from(FORMATS)), hidden, inner, rows,
        activation=draw(st.sampled_from(ACTIVATIONS)), has_bias=draw(st.booleans()),
        seed=draw(st.integers(0, 99)), second_format=draw(st.none() | st.sampled_from(FORMATS)),
    )  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(layer=layers())
def test_any_layer_on_every_instruction_set(layer: Layer) -> None:
    num_rows = sum(len(tokens) for tokens in layer.rows)
    num_inner = max(1, num_rows * layer.layout.intermediate_size)
    # A last bit of the first projection may change a code of the second's input by one step of 127,
    # which matters where there are few codes.
    tolerance = max(1e-3, 0.15 / num_inner**0.5)
    expected = layer.expected(is_rounded=True)
    for isa, engine in ENGINES.items():
        actual = layer.compute(engine)
        assert [rows.shape for rows in actual] == [rows.shape for rows in expected]
        if num_rows:
            assert relative_error(actual, expected) <= tolerance, isa


@pytest.mark.parametrize("has_outliers", [False, True])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_rounding_of_activations_costs_what_is_documented(
    fmt: WeightFormat, has_outliers: bool
) -> None:
    layer = make_layer(fmt, 512, 512, [list(range(12))])
    if has_outliers:
        layer.hidden[:, torch.randperm(512)[:4]] *= 20
    exact = {"bf16": 4e-3, "fp8": 4e-3, "fp16": 1e-5}
    tolerance = exact.get(fmt.kind, 4e-2 if has_outliers else 2e-2)
    expected = layer.expected(is_rounded=False)
    for isa, engine in ENGINES.items():
        assert relative_error(layer.compute(engine), expected) <= tolerance, isa


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("fmt", ["bf16", "fp16", "fp8", "int8", "int4", "int4z", "mxfp4"])
def test_what_is_not_finite_comes_out_as_in_the_reference(
    fmt: str, activation: NativeActivation, isa: str
) -> None:
    for num_tokens in (3, 9):
        rows = [list(range(num_tokens))]
        layer = make_layer(find_format(fmt), 128, 80, rows, activation=activation)
        for value in (float("nan"), float("inf"), -float("inf")):
            layer.hidden[1, 40] = value
            actual, expected = layer.compute(ENGINES[isa])[0], layer.expected(is_rounded=True)[0]
            is_bad = ~torch.isfinite(expected).all(dim=1)
            assert not torch.isfinite(actual[is_bad]).all(dim=1).any(), (num_tokens, value)
            assert torch.isfinite(actual[torch.arange(num_tokens) != 1]).all(), (num_tokens, value)


@pytest.mark.parametrize("isa", ISAS)
def test_zero_points_in_the_padding_do_not_count(isa: str) -> None:
    layer = make_layer(find_format("int4z-g128"), 100, 80, [[0, 1, 2], list(range(9))])
    expected = layer.compute(ENGINES[isa])
    for buffer in layer.store:
        layer.layout.up_half(buffer, 0).words[:, 13:] = 0x7F3B5D19  # from column 104 on
        layer.layout.down_blocks(buffer).words[:, 10:] = 0x7F3B5D19  # from column 80 on
    for actual, rows in zip(layer.compute(ENGINES[isa]), expected, strict=True):
        assert torch.equal(actual, rows)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", ["bf16", "fp16", "fp8", "int8", "int4", "int4z", "mxfp4"])
def test_threads_and_repetition_change_no_bit(fmt: str, isa: str) -> None:
    layer = make_layer(find_format(fmt), 176, 100, [[0], [3, 1, 2], [], list(range(70))])
    expected = layer.compute(ENGINES[isa])
    for num_threads in (1, 2, 5):
        engine = start_engine(num_threads=num_threads, isa=isa)
        for _ in range(3):
            for actual, rows in zip(layer.compute(engine), expected, strict=True):
                assert torch.equal(actual, rows)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", ["bf16", "fp16", "fp8", "int8", "int4", "int4z", "mxfp4"])
def test_memory_need_not_be_aligned_to_registers(fmt: str, isa: str) -> None:
    layer = make_layer(find_format(fmt), 64, 48, [[0, 1], list(range(9))], has_bias=True)
    expected = layer.compute(ENGINES[isa])
    bytes_ = torch.empty(layer.store.numel() + 8, dtype=torch.uint8)[8:].view_as(layer.store)
    hidden = torch.empty(layer.hidden.numel() + 1)[1:].view_as(layer.hidden)
    moved = Layer(layer.layout, bytes_.copy_(layer.store), SILU, hidden.copy_(layer.hidden),
                  layer.rows)  # fmt: skip
    for actual, rows in zip(moved.compute(ENGINES[isa]), expected, strict=True):
        assert torch.equal(actual, rows)


@pytest.mark.parametrize(
    ("begin", "token", "message"),
    [
        ([0, 1, 2], [0, 3], "row 1 belongs to token 3, expected 0 to 2"),
        ([0, 1, 2], [-1, 0], "row 0 belongs to token -1, expected 0 to 2"),
        ([0, 3, 2], [0, 1], "falls from 3 to 2 at expert 1"),
        ([0, 1, 3], [0, 1], "goes from 0 to 3, expected 0 to 2"),
        ([1, 1, 2], [0, 1], "goes from 1 to 2, expected 0 to 2"),
        ([-5, 1, 2], [0, 1], "goes from -5 to 2, expected 0 to 2"),
        ([0, 1, 2], [0, 1], "expert 1 of the call has rows but no address"),
    ],
)
def test_routing_out_of_range_is_an_error_before_anything_is_read(
    begin: list[int], token: list[int], message: str
) -> None:
    layer = make_layer(find_format("int4"), 32, 32, [[0, 1, 2], [0]])
    addresses = layer.addresses()
    addresses[1] *= "address" not in message
    with pytest.raises(ModelError, match=message):
        compute_experts(
            ENGINES[ISAS[0]], layer.layout, addresses, SILU, layer.hidden,
            torch.tensor(begin, dtype=torch.int32), torch.tensor(token, dtype=torch.int32),
            torch.empty(2, 32),
        )  # fmt: skip
