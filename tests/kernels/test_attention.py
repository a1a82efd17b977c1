"""Tests of attention over a KV cache against the definition: shapes, masks, sinks."""

import dataclasses
import functools

import pytest
import torch

from tandem.core.errors import ConfigError
from tandem.kernels._native import available_isas
from tandem.kernels.attention import KV_DTYPES, AttentionForm, CachedAttention, require_kv_dtype
from tandem.kernels.dense import CpuThreads
from tests.kernels.attention_cases import form_of

CAPACITY = 700
THREADS = CpuThreads(num_threads=2)


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> None:
    torch.manual_seed(0)


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
    form_of(4, 2, 32, window=40, keeps_prompt=True),
    form_of(6, 2, 32, chunk=37),
    form_of(4, 2, 32, chunk=600, window=300),
]
PROMPT_LENGTHS = torch.tensor([20, 130, 0])  # of the rows


def plain(
    form: AttentionForm, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int,
    sinks: torch.Tensor | None, row: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Compute a token's attention by head: q (heads, dim), k and v (kv heads, positions, dim)."""
    places = torch.arange(position + 1)
    seen = places > position - (form.window or position + 1)
    if form.chunk:
        seen &= places >= position // form.chunk * form.chunk
    if form.keeps_prompt:
        seen |= places < PROMPT_LENGTHS[row]
    outs = []
    for head in range(form.num_heads):
        kv = head // (form.num_heads // form.num_kv_heads)
        scores = k[kv, places[seen]].double() @ q[head].double() * form.scale
        if form.softcap:
            scores = form.softcap * torch.tanh(scores / form.softcap)
        extra = torch.tensor([float("-inf") if sinks is None else float(sinks[head])]).double()
        weights = torch.cat([scores, extra]).softmax(0)[:-1]
        outs.append(weights @ v[kv, places[seen]].double())
    return torch.stack(outs)


def keys_and_values(
    form: AttentionForm, dtype: torch.dtype, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    lead = (rows, form.num_kv_heads, CAPACITY)
    keys = torch.randn(*lead, form.key_dim, generator=random).to(dtype)
    return keys, torch.randn(*lead, form.value_dim, generator=random).to(dtype)


def filled(
    form: AttentionForm, dtype: torch.dtype, sinks: torch.Tensor | None = None, kv_dtype: str = "",
    rows: int = 3,
) -> tuple[CachedAttention, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return a full cache, and its keys and values (slots, kv heads, positions, dim)."""
    keys, values = keys_and_values(form, dtype, rows)
    attention = CachedAttention(form, kv_dtype or dtype, sinks, PROMPT_LENGTHS)
    attention.reserve(rows, CAPACITY)
    for row in range(rows):
        places = torch.full((CAPACITY,), row), torch.arange(CAPACITY)
        attention.append(THREADS, *places, keys[row], values[row])
    return attention, keys, values


def sinks_of(form: AttentionForm, has_sinks: bool) -> torch.Tensor | None:
    return torch.linspace(-1, 4, form.num_heads) if has_sinks else None


@functools.cache
def defined(
    form: AttentionForm, dtype: torch.dtype, rows: tuple[int, ...], positions: tuple[int, ...],
    has_sinks: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return queries (heads, tokens, dim) and their attention by definition, shared by tests."""
    (keys, values), sinks = keys_and_values(form, dtype, 3), sinks_of(form, has_sinks)
    query = torch.randn(len(rows), form.num_heads, form.key_dim).to(dtype).transpose(0, 1)
    expected = [
        plain(form, query[:, token], keys[row], values[row], position, sinks, row)
        for token, (row, position) in enumerate(zip(rows, positions, strict=True))
    ]
    return query, torch.stack(expected)


def require_definition(
    form: AttentionForm, dtype: torch.dtype, rows: torch.Tensor, positions: torch.Tensor,
    isa: str, has_sinks: bool,
) -> None:  # fmt: skip
    """Attend for tokens of some slots and positions; compare each with the definition."""
    attention, *_ = filled(form, dtype, sinks_of(form, has_sinks))
    query, expected = defined(form, dtype, (*rows.tolist(),), (*positions.tolist(),), has_sinks)
    actual = attention.attend(CpuThreads(num_threads=2, isa=isa), rows, positions, query)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_decode_equals_the_definition(isa: str, dtype: torch.dtype, has_sinks: bool) -> None:
    rows = torch.tensor([2, 0, 1, 1])
    positions = torch.tensor([0, 33, 300, 699])
    for form in FORMS:
        require_definition(form, dtype, rows, positions, isa, has_sinks)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first_position", [0, 3, 290])
def test_a_prompts_attention_equals_the_definition(
    isa: str, dtype: torch.dtype, first_position: int
) -> None:
    # Tokens of two slots: one fills several tiles, the other has three.
    rows = torch.tensor([1] * 70 + [2] * 3)
    positions = torch.cat([torch.arange(first_position, first_position + 70), torch.arange(3)])
    for form in FORMS:
        require_definition(form, dtype, rows, positions, isa, has_sinks=first_position == 3)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_keys_and_values_cost_a_percent(isa: str, dtype: torch.dtype) -> None:
    rows, positions = torch.ones(4, dtype=torch.int64), torch.tensor([0, 40, 300, 699])
    for form in FORMS:
        attention, keys, values = filled(form, dtype, None, "int8")
        query = torch.randn(4, form.num_heads, form.key_dim).to(dtype).transpose(0, 1)
        actual = attention.attend(CpuThreads(num_threads=2, isa=isa), rows, positions, query)
        for token, position in enumerate(positions.tolist()):
            expected = plain(form, query[:, token], keys[1], values[1], position, None, 1)
            assert (actual[token] - expected).norm() < 0.02 * expected.norm()


def test_int8_survives_channels_that_stand_out() -> None:
    form = form_of(8, 2, 128)
    attention, keys, values = filled(form, torch.float32, None, "int8")
    keys[..., 7] *= 20  # as in models, where one channel of the keys is large at all positions
    places = torch.zeros(CAPACITY, dtype=torch.int64), torch.arange(CAPACITY)
    attention.append(THREADS, *places, keys[0], values[0])
    query = torch.randn(8, 1, 128)
    query[..., 7] /= 20
    actual = attention.attend(THREADS, torch.tensor([0]), torch.tensor([699]), query)[0]
    expected = plain(form, query[:, 0], keys[0], values[0], 699, None)
    assert (actual - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8"])
def test_what_was_not_written_is_never_heard(kv_dtype: str) -> None:
    form = form_of(4, 2, 24, 16)
    attention = CachedAttention(form, kv_dtype)
    attention.reserve(2, 64)
    attention.keys.fill_(255)  # NaN in any floating format
    attention.values.fill_(255)
    key, value = torch.randn(2, 5, 24), torch.randn(2, 5, 16)
    rows, positions = torch.ones(5, dtype=torch.int64), torch.arange(5)
    attention.append(THREADS, rows, positions, key, value)
    assert (attention.keys[0] == 255).all()
    query = torch.randn(4, 5, 24)
    actual = attention.attend(THREADS, rows, positions, query)
    for token in range(5):
        expected = plain(form, query[:, token], key, value, token, None)
        torch.testing.assert_close(actual[token].double(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("what", ["query", "key", "value"])
def test_what_is_no_number_stays_to_be_seen(isa: str, kv_dtype: str, what: str) -> None:
    form, threads = form_of(4, 2, 24, 16), CpuThreads(num_threads=1, isa=isa)
    attention = CachedAttention(form, kv_dtype)
    attention.reserve(2, 64)
    parts = {"query": torch.randn(4, 2, 24), "key": torch.randn(2, 40, 24)}
    parts["value"] = torch.randn(2, 40, 16)
    for row in range(2):
        places = torch.full((40,), row), torch.arange(40)
        attention.append(threads, *places, parts["key"], parts["value"])
    if what == "query":
        parts["query"][1, 0, 3] = float("nan")
    else:
        parts[what][0, 39, 3] = float("nan")
        key, value = parts["key"][:, 39:], parts["value"][:, 39:]
        attention.append(threads, torch.tensor([0]), torch.tensor([39]), key, value)
    out = attention.attend(threads, torch.arange(2), torch.full((2,), 39), parts["query"])
    assert out[0, 1].isnan().any()  # KV head 0 of row 0
    assert not out[0, 2:].isnan().any()
    assert not out[1].isnan().any()


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8"])
def test_tokens_see_the_selected_positions_alone(isa: str, kv_dtype: str) -> None:
    threads = CpuThreads(num_threads=2, isa=isa)
    rows = torch.tensor([1] * 70 + [2, 0, 2])
    positions = torch.cat([torch.arange(600, 670), torch.tensor([30, 699, 699])])
    selected = torch.stack([torch.randperm(699)[:60] for _ in rows]).to(torch.int32)
    selected[70] = torch.randperm(60)  # later positions than its own are not seen
    selected[70, 0] = 30
    selected[71, 20:] = -1
    selected[72, 0] = -1  # sees all
    for form in [form_of(8, 2, 64), form_of(4, 4, 24, 16), form_of(4, 2, 32, softcap=3.0)]:
        attention, keys, values = filled(form, torch.float32, sinks_of(form, True), kv_dtype)
        query = torch.randn(len(rows), form.num_heads, form.key_dim).transpose(0, 1)
        actual = attention.attend(threads, rows, positions, query, selected)
        for token, (row, position) in enumerate(
            zip(rows.tolist(), positions.tolist(), strict=True)
        ):
            seen = {p for p in selected[token].tolist() if 0 <= p <= position}
            some = sorted(seen) if selected[token, 0] >= 0 else list(range(position + 1))
            k, v = keys[row][:, some], values[row][:, some]
            expected = plain(form, query[:, token], k, v, len(some) - 1, sinks_of(form, True))
            tolerance = {"fp32": 1e-5, "bf16": 0.02, "int8": 0.04}[kv_dtype]
            assert (actual[token] - expected).norm() < tolerance * expected.norm()


def test_each_kv_head_sees_the_blocks_that_it_selects() -> None:
    rows, positions = torch.tensor([1, 1, 2, 0]), torch.tensor([600, 601, 30, 699])
    form = dataclasses.replace(form_of(4, 2, 32), selected_block=24, selects_by_head=True)
    selected = torch.stack([torch.randperm(29)[:6] for _ in range(8)]).to(torch.int32)
    selected[6, 3:] = selected[7, 0] = -1  # fewer, and all
    selected[4, 0] = selected[5, 0] = 0
    attention, keys, values = filled(form, torch.float32)
    query = torch.randn(4, 4, 32)
    actual = attention.attend(THREADS, rows, positions, query, selected.view(4, 2, 6))
    for token, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        for head in range(4):
            chosen = selected[2 * token + head // 2].tolist()
            some = [p for p in range(position + 1) if chosen[0] < 0 or p // 24 in chosen]
            of_head = query[:, token]
            k, v = keys[row][:, some], values[row][:, some]
            expected = plain(form, of_head, k, v, len(some) - 1, None)[head]
            torch.testing.assert_close(actual[token, head].double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_keep_what_they_hold_when_they_grow_or_are_copied() -> None:
    form = form_of(4, 2, 24, 16)
    attention, keys, values = filled(form, torch.float32)
    before = attention.num_bytes
    attention.reserve(3, 2 * CAPACITY, used=CAPACITY)
    assert attention.num_bytes > 1.8 * before
    attention.copy_prefix(0, 2, 600)
    query = torch.randn(4, 2, 24)
    actual = attention.attend(THREADS, torch.tensor([1, 2]), torch.tensor([699, 599]), query)
    for token, (row, position) in enumerate([(1, 699), (0, 599)]):
        expected = plain(form, query[:, token], keys[row], values[row], position, None)
        torch.testing.assert_close(actual[token].double(), expected, rtol=1e-5, atol=1e-5)


def test_bytes_are_those_of_the_format() -> None:
    sizes = [CachedAttention(form_of(8, 4, 128), name).bytes_of(1600) for name in KV_DTYPES]
    plain_bytes = 1600 * 4 * 128 * 2
    scales = 1600 * 4 * 2 * 4
    assert sizes == [4 * plain_bytes, 2 * plain_bytes, plain_bytes + scales]


def test_an_unknown_kv_dtype_gets_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"kv_dtype is 'int4'.*did you mean 'int8'"):
        require_kv_dtype("int4")


@pytest.mark.parametrize("heads", [1, 2, 4, 7, 16, 40])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (96, 32), (576, 512)])
def test_tiles_give_what_vectors_give(heads: int, key_dim: int, value_dim: int) -> None:
    """Skipped unless the processor has tiles (AMX)."""
    if "amx" not in available_isas():
        pytest.skip("this processor has no tiles")
    tiles, vectors = (CpuThreads(num_threads=2, isa=isa) for isa in ("amx", "avx512"))
    attention, _, _ = filled(form_of(heads, 1, key_dim, value_dim), torch.bfloat16, rows=1)
    for positions in ([0], [15], [40], [47, 48, 49], [680, 681, 682, 683, 684]):
        query = torch.randn(heads, len(positions), key_dim).bfloat16()
        places = torch.tensor(positions)
        found, expected = (
            attention.attend(threads, torch.zeros_like(places), places, query).float()
            for threads in (tiles, vectors)
        )
        assert (found - expected).norm() < 5e-3 * expected.norm()
        alone = attention.attend(tiles, torch.zeros(1).long(), places[-1:], query[:, -1:])
        assert torch.equal(alone[0].float(), found[-1])


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 30])
def test_a_bias_by_distance_and_sinks_of_each_token(
    isa: str, dtype: torch.dtype, window: int
) -> None:
    form, extent = form_of(6, 2, 32, window=window), 70
    key, value = (torch.randn(2, 200, 32).to(dtype) for _ in range(2))
    profiles, threads = torch.randn(5, extent), CpuThreads(num_threads=2, isa=isa)
    attention = CachedAttention(form, dtype, profiles=profiles)
    attention.reserve(1, 200)
    attention.append(threads, torch.zeros(200).long(), torch.arange(200), key, value)
    for positions in (torch.arange(120, 190), torch.tensor([0]), torch.tensor([199])):
        count = len(positions)
        query, states = (torch.randn(6, count, n).to(dtype) for n in (32, 5))
        sinks, slots = torch.randn(count, 6).to(dtype), torch.zeros(count).long()
        optional = {"bias_states": states, "sinks": sinks}
        actual = attention.attend(threads, slots, positions, query, **optional)
        scores = query.double() @ key.repeat_interleave(3, 0).double().mT * form.scale
        for token, position in enumerate(positions.tolist()):
            for distance in range(min(extent, position + 1)):
                added = states[:, token].double() @ profiles[:, distance].double()
                scores[:, token, position - distance] += added
            scores[:, token, position + 1 :] = float("-inf")
            scores[:, token, : max(0, position + 1 - (window or 200))] = float("-inf")
        whole = torch.cat([scores, sinks.T[..., None].double()], -1).softmax(-1)[..., :-1]
        expected = (whole @ value.repeat_interleave(3, 0).double()).transpose(0, 1)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
