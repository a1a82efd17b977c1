"""Tests that a token's result has the same bits in any batch, on every instruction set.

Otherwise an answer would depend on the other requests.
"""

import functools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.kernels._native import ExpertEngine, available_isas
from tandem.kernels.attention import KV_DTYPES
from tandem.kernels.dense import CpuThreads, DenseWeight, multiply
from tandem.kernels.engine import start_engine
from tandem.kernels.formats.weight_format import FORMATS, WeightFormat, find_format
from tests.kernels.formats.sources import pack_any
from tests.kernels.layers import Layer, make_layer
from tests.kernels.test_attention import CAPACITY, FORMS, filled

MAX_ROWS = 64
# Products that plain C++ may take for an example: a tenth of a second.
MAX_PORTABLE_PRODUCTS = 40_000_000
FORMATS_OF_LAYERS = st.sampled_from(FORMATS)
SIZES = st.sampled_from([16, 96, 128, 136, 576, 640]) | st.integers(1, 300)
NUM_TOKENS = st.integers(1, MAX_ROWS)


@functools.cache
def weight_of(fmt: WeightFormat, rows: int, cols: int) -> DenseWeight:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)) / cols**0.5
    return DenseWeight(pack_any(weight, fmt), None)


@functools.cache
def threads_of(isa: str) -> CpuThreads:
    return CpuThreads(num_threads=2, isa=isa)


@pytest.mark.parametrize("isa", available_isas())
@settings(max_examples=60)
@given(fmt=FORMATS_OF_LAYERS, rows=SIZES, cols=SIZES, num_tokens=NUM_TOKENS, is_bf16=st.booleans())
@example(fmt=find_format("bf16"), rows=1536, cols=576, num_tokens=64, is_bf16=True)
@example(fmt=find_format("fp16"), rows=1536, cols=576, num_tokens=3, is_bf16=False)
@example(fmt=find_format("bf16"), rows=2048, cols=2048, num_tokens=2, is_bf16=False)
@example(fmt=find_format("fp16"), rows=2048, cols=2048, num_tokens=9, is_bf16=False)
@example(fmt=find_format("int8"), rows=96, cols=1536, num_tokens=33, is_bf16=False)
@example(fmt=find_format("int4-g128"), rows=136, cols=640, num_tokens=47, is_bf16=False)
@example(fmt=find_format("bf16"), rows=96, cols=576, num_tokens=37, is_bf16=False)
@example(fmt=find_format("iq1_m"), rows=40, cols=300, num_tokens=9, is_bf16=False)
@example(fmt=find_format("iq3_s"), rows=96, cols=512, num_tokens=3, is_bf16=False)
def test_rows_of_a_dense_product(
    isa: str, fmt: WeightFormat, rows: int, cols: int, num_tokens: int, is_bf16: bool
) -> None:
    if isa == "portable":
        num_tokens = min(num_tokens, max(2, MAX_PORTABLE_PRODUCTS // (rows * cols)))
    threads, weight = threads_of(isa), weight_of(fmt, rows, cols)
    x = torch.randn(num_tokens, cols, generator=torch.Generator().manual_seed(num_tokens))
    x = x.bfloat16() if is_bf16 else x
    (together,) = multiply(threads, [weight], x)
    alone = torch.cat([multiply(threads, [weight], row)[0] for row in x.split(1)])
    assert torch.equal(together, alone)


@functools.cache
def layer_of(fmt: WeightFormat, hidden: int, inner: int) -> Layer:
    return make_layer(fmt, hidden, inner, [list(range(MAX_ROWS))] * 2)


@pytest.mark.parametrize("isa", available_isas())
@settings(max_examples=40)
@given(fmt=FORMATS_OF_LAYERS, hidden=SIZES, inner=SIZES, num_tokens=NUM_TOKENS)
@example(fmt=find_format("bf16"), hidden=576, inner=640, num_tokens=64)
@example(fmt=find_format("fp8"), hidden=640, inner=576, num_tokens=9)
@example(fmt=find_format("fp8"), hidden=640, inner=384, num_tokens=43)
@example(fmt=find_format("int4"), hidden=640, inner=96, num_tokens=13)
@example(fmt=find_format("int8"), hidden=640, inner=384, num_tokens=17)
def test_routed_tokens_of_an_expert(
    isa: str, fmt: WeightFormat, hidden: int, inner: int, num_tokens: int
) -> None:
    if isa == "portable":
        num_tokens = min(num_tokens, max(2, MAX_PORTABLE_PRODUCTS // (6 * hidden * inner)))
    experts = experts_of(isa)
    layer = layer_of(fmt, hidden, inner)
    tokens = list(range(num_tokens))
    together = of_rows(layer, [tokens, tokens[::-1]]).compute(experts)
    for token in tokens[:: max(1, num_tokens // 5)]:
        first, second = of_rows(layer, [[token], [token]]).compute(experts)
        assert torch.equal(together[0][token], first[0])
        assert torch.equal(together[1][num_tokens - 1 - token], second[0])


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
@pytest.mark.parametrize(("hidden", "inner"), [(16, 32), (136, 300), (640, 576)])
def test_few_tokens_of_an_expert(isa: str, fmt: str, hidden: int, inner: int) -> None:
    """Few are added up in registers, many on tiles where there are some."""
    layer = layer_of(find_format(fmt), hidden, inner)
    (many, _) = of_rows(layer, [list(range(20)), []]).compute(experts_of(isa))
    for tokens in range(1, 9):
        (few, _) = of_rows(layer, [list(range(tokens)), []]).compute(experts_of(isa))
        assert torch.equal(few, many[:tokens])


@functools.cache
def experts_of(isa: str) -> ExpertEngine:
    return start_engine(num_threads=2, isa=isa)


def of_rows(layer: Layer, rows: list[list[int]]) -> Layer:
    return Layer(layer.layout, layer.store, layer.activation, layer.hidden, rows)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("kv_dtype", sorted(KV_DTYPES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_in_attention(isa: str, kv_dtype: str, dtype: torch.dtype) -> None:
    """Attend a prompt at once, in chunks, token by token, and beside other sequences."""
    rows = torch.tensor([1] * 70 + [0, 2, 2])
    positions = torch.cat([torch.arange(290, 360), torch.tensor([CAPACITY - 1, 3, 4])])
    for form in FORMS[::3]:
        attention, *_ = filled(form, dtype, None, kv_dtype)
        query = torch.randn(form.num_heads, len(rows), form.key_dim).to(dtype)
        attend = functools.partial(attention.attend, threads_of(isa))
        together = attend(rows, positions, query)
        for chunk in (1, 16, 33):
            parts = [slice(i, i + chunk) for i in range(0, len(rows), chunk)]
            apart = torch.cat([attend(rows[p], positions[p], query[:, p]) for p in parts])
            assert torch.equal(together, apart), (form, chunk)
