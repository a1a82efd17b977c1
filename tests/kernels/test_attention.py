"""Attention over a KV cache against the plain definition, over shapes, masks and sinks."""

import pytest
import torch

from tandem.kernels._native import available_isas
from tandem.kernels.attention import AttentionForm, CachedAttention, Segment
from tandem.kernels.dense import CpuThreads

CAPACITY = 700


def form_of(
    heads: int, kv_heads: int, key_dim: int, value_dim: int = 0, **more: float
) -> AttentionForm:
    return AttentionForm(
        num_heads=heads, num_kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim or key_dim,
        scale=key_dim**-0.5, softcap=more.get("softcap", 0.0), window=int(more.get("window", 0)),
    )  # fmt: skip


FORMS = [
    form_of(8, 2, 64),
    form_of(4, 4, 24, 16),
    form_of(7, 1, 16),
    form_of(6, 2, 64),
    form_of(5, 1, 96, 128),
    form_of(6, 2, 80, 128),
    form_of(8, 1, 128, window=5),
    form_of(4, 2, 32, softcap=3.0),
    form_of(4, 2, 32, softcap=2.0, window=300),
]


def plain(
    form: AttentionForm, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """One token's attention, head by head: q (heads, dim), k and v (kv heads, positions, dim)."""
    first = max(0, position + 1 - form.window) if form.window else 0
    outs = []
    for head in range(form.num_heads):
        kv = head // (form.num_heads // form.num_kv_heads)
        scores = k[kv, first : position + 1].double() @ q[head].double() * form.scale
        if form.softcap:
            scores = form.softcap * torch.tanh(scores / form.softcap)
        extra = torch.tensor([float("-inf") if sinks is None else float(sinks[head])]).double()
        weights = torch.cat([scores, extra]).softmax(0)[:-1]
        outs.append(weights @ v[kv, first : position + 1].double())
    return torch.stack(outs)


def filled(
    form: AttentionForm, dtype: torch.dtype, rows: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    keys = torch.randn(rows, form.num_kv_heads, CAPACITY, form.key_dim, generator=random)
    values = torch.randn(rows, form.num_kv_heads, CAPACITY, form.value_dim, generator=random)
    return keys.to(dtype), values.to(dtype)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_decode_equals_the_definition(isa: str, dtype: torch.dtype, has_sinks: bool) -> None:
    threads = CpuThreads(num_threads=2, isa=isa)
    rows = torch.tensor([2, 0, 1, 1])
    positions = torch.tensor([0, 33, 300, 699])
    for form in FORMS:
        keys, values = filled(form, dtype)
        sinks = torch.linspace(-1, 4, form.num_heads) if has_sinks else None
        attention = CachedAttention(form, keys, values, sinks)
        query = torch.randn(4, form.num_heads, form.key_dim).to(dtype).transpose(0, 1)
        actual = attention.attend(threads, rows, positions, query)
        for token in range(4):
            row, position = int(rows[token]), int(positions[token])
            wanted = plain(form, query[:, token], keys[row], values[row], position, sinks)
            tolerance = 1e-5 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(
                actual[token].double(), wanted, rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("first_position", [0, 3, 290])
def test_a_prompts_attention_equals_that_of_its_tokens(
    form: AttentionForm, has_sinks: bool, first_position: int
) -> None:
    threads = CpuThreads(num_threads=2)
    keys, values = filled(form, torch.float32)
    sinks = torch.linspace(-1, 4, form.num_heads) if has_sinks else None
    attention = CachedAttention(form, keys, values, sinks)
    query = torch.randn(form.num_heads, 20, form.key_dim)
    together = attention.attend_segment(Segment(1, first_position, 20), query)
    positions = torch.arange(first_position, first_position + 20)
    alone = attention.attend(threads, torch.ones(20, dtype=torch.int64), positions, query)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_append_writes_only_its_places(cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    form = form_of(4, 2, 24, 16)
    keys, values = filled(form, cache_dtype)
    before = keys.clone(), values.clone()
    rows, positions = torch.tensor([1, 0, 1]), torch.tensor([5, 699, 6])
    key = torch.randn(3, 2, 24).to(dtype).transpose(0, 1)  # as models have it: heads first
    value = torch.randn(2, 3, 16).to(dtype)
    attention = CachedAttention(form, keys, values)
    attention.append(CpuThreads(num_threads=1), rows, positions, key, value)
    for cache, old, new in ((keys, before[0], key), (values, before[1], value)):
        old[rows, :, positions] = new.transpose(0, 1).to(cache_dtype)
        assert torch.equal(cache, old)
