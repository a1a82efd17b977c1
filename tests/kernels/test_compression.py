"""Tests of compressed keys against torch: windows that become keys, and attention with them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.kernels.attention import AttentionForm, CachedAttention, CompressedKeys
from tandem.kernels.dense import CpuThreads
from tandem.kernels.recurrent import MOST_DRAFTED, Compression, StateTokens, new_layer_state
from tests.kernels.layers import draw

pytestmark = pytest.mark.every_isa

DTYPES = [torch.float32, torch.bfloat16]


def compressed(values: Tensor, gates: Tensor, bias: Tensor, num_series: int) -> Tensor:
    """Return the keys of whole windows by torch: (windows, dim) from (n_tokens, series * dim)."""
    ratio, width = bias.shape
    count, dim = len(values) // ratio, width // num_series
    shape = count, ratio, num_series, dim
    x = values[: count * ratio].float().view(shape)
    z = (gates[: count * ratio].float().view(count, ratio, width) + bias).view(shape)
    if num_series == 2:  # the window before, by the first series
        before = torch.zeros_like(x[:1, :, 0]), torch.full_like(z[:1, :, 0], -torch.inf)
        x = torch.cat([torch.cat([before[0], x[:-1, :, 0]]), x[:, :, 1]], dim=1)
        z = torch.cat([torch.cat([before[1], z[:-1, :, 0]]), z[:, :, 1]], dim=1)
    else:
        x, z = x[:, :, 0], z[:, :, 0]
    return (x * z.softmax(dim=1)).sum(dim=1)


def advance(state: Any, threads: CpuThreads, slot: int, first: int, *inputs: Tensor) -> Tensor:
    positions = torch.arange(first, first + len(inputs[0]))
    tokens = StateTokens(torch.full_like(positions, slot), positions)
    out: Tensor = state(threads, tokens, inputs)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("ratio", "dim", "num_series"), [(4, 512, 2), (128, 512, 1), (3, 17, 2), (1, 5, 2), (6, 100, 1)]
)
def test_windows_whole_and_in_parts(
    threads: CpuThreads, dtype: torch.dtype, ratio: int, dim: int, num_series: int
) -> None:
    count, width = 3 * ratio + 2, num_series * dim
    values, gates = (draw(count, width, seed=n, dtype=dtype) for n in (1, 2))
    bias = draw(ratio, width, seed=3)
    state = new_layer_state(3, Compression(bias, num_series))
    expected = torch.zeros(count, dim)
    expected[ratio - 1 :: ratio] = compressed(values, gates, bias, num_series)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    whole = advance(state, threads, 1, 0, values, gates)
    torch.testing.assert_close(whole.float(), expected, rtol=tolerance, atol=tolerance)
    assert (whole[expected.abs().sum(-1) == 0] == 0).all()
    first = 0
    for end in sorted({1, ratio, ratio + 1, 2 * ratio, count}):  # of another slot
        part = slice(first, end)
        found = advance(state, threads, 2, first, values[part], gates[part])
        assert torch.equal(found, whole[part])
        first = end


def test_as_many_tokens_as_are_drafted_may_be_written_again(threads: CpuThreads) -> None:
    ratio, num_series, dim = 4, 2, 24
    values, gates = (draw(60, num_series * dim, seed=n) for n in (1, 2))
    bias = draw(ratio, num_series * dim, seed=3)
    state = new_layer_state(1, Compression(bias, num_series))
    expected = advance(state, threads, 0, 0, values, gates)
    for at in range(20, 52):
        others = draw(MOST_DRAFTED, num_series * dim, seed=at)
        advance(state, threads, 0, 0, values[:at], gates[:at])
        advance(state, threads, 0, at, others, others)
        assert torch.equal(advance(state, threads, 0, at, values[at:], gates[at:]), expected[at:])


def test_a_slot_that_is_not_there_is_refused(threads: CpuThreads) -> None:
    state = new_layer_state(2, Compression(torch.zeros(4, 8), 1))
    with pytest.raises(ValueError, match="position 0 of slot 2, expected slot 0 to 1"):
        advance(state, threads, 2, 0, torch.zeros(1, 8), torch.zeros(1, 8))


WINDOW, RATIO, TOKENS = 6, 4, 2600


def attention_of(
    dim: int,
    dtype: torch.dtype,
    sinks: Tensor | None,
    kv_dtype: str = "",
    heads: int = 5,
    capacity: int = TOKENS,
) -> tuple[CachedAttention, CompressedKeys]:
    """Return attention heads and their compressed keys in three slots."""
    form = AttentionForm(
        num_heads=heads, num_kv_heads=1, key_dim=dim, value_dim=dim, scale=dim**-0.5, window=WINDOW
    )
    attention = CachedAttention(form, kv_dtype or dtype, sinks, is_joint=True)
    kept = attention.compress(RATIO)
    attention.reserve(3, capacity)
    kept.reserve(3, TOKENS)
    return attention, kept


def plain(query: Tensor, own: Tensor, compressed_keys: Tensor, sinks: Tensor | None) -> Tensor:
    """Compute one token's attention: query (heads, dim), keys (n, dim) that are also values."""
    keys = torch.cat([own, compressed_keys]).double()
    scores = query.double() @ keys.T * query.shape[-1] ** -0.5
    nothing = torch.full((len(query),), -torch.inf) if sinks is None else sinks
    weights = torch.cat([scores, nothing[:, None].double()], dim=-1).softmax(-1)[:, :-1]
    return weights @ keys


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_sinks", [True, False])
@pytest.mark.parametrize("dim", [512, 24])
@pytest.mark.parametrize("most", [None, 9])
@pytest.mark.parametrize("kv_dtype", ["", "int8"])
def test_a_window_and_compressed_keys(
    threads: CpuThreads,
    dtype: torch.dtype,
    has_sinks: bool,
    dim: int,
    most: int | None,
    kv_dtype: str,
) -> None:
    """Slots with few, no and several segments of compressed keys."""
    sinks = draw(5, seed=4) if has_sinks else None
    attention, _ = attention_of(dim, dtype, sinks, kv_dtype)
    keys, compressed_keys = (draw(3, TOKENS, dim, seed=n, dtype=dtype) for n in (1, 2))
    lengths = {0: 2, 1: 37, 2: TOKENS}
    for slot, count in lengths.items():
        at = torch.arange(count)
        slots, own, more = (
            torch.full_like(at, slot),
            keys[slot, :count],
            compressed_keys[slot, :count],
        )
        attention.append(threads, slots, at, own[None], own[None], more[None])
    slots = torch.tensor([2, 0, *[1] * 9, 2, 2])
    at = torch.tensor([5, 1, *range(28, 37), TOKENS - 2, TOKENS - 1])
    query = draw(5, len(at), dim, seed=5, dtype=dtype)
    selected = None
    if most is not None:
        seen = (at + 1) // RATIO
        chosen = [torch.randperm(int(n))[:most].tolist() if n > most else [] for n in seen]
        rows = [[*row, *[-1] * (most - len(row))] for row in chosen]
        selected = torch.tensor(rows, dtype=torch.int32)
    actual = attention.attend(threads, slots, at, query, selected)
    tolerance = 5e-2 if kv_dtype else 1e-5 if dtype == torch.float32 else 2e-2
    for token, (slot, position) in enumerate(zip(slots.tolist(), at.tolist(), strict=True)):
        own = keys[slot, max(0, position + 1 - WINDOW) : position + 1]
        all_compressed = compressed_keys[slot, : position + 1][RATIO - 1 :: RATIO]
        some = [] if selected is None else [n for n in selected[token].tolist() if n >= 0]
        expected = plain(
            query[:, token], own, all_compressed[some] if some else all_compressed, sinks
        )
        torch.testing.assert_close(actual[token].double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("heads", [5, 64])
def test_a_token_does_not_depend_on_the_others(
    threads: CpuThreads, kv_dtype: str, heads: int
) -> None:
    """Attend alone, beside neighbours and beside other slots, near ends of windows and segments."""
    attention, _ = attention_of(32, torch.float32, draw(heads, seed=4), kv_dtype, heads)
    keys, compressed_keys = (draw(TOKENS, 32, seed=n) for n in (1, 2))
    places, ones = torch.arange(TOKENS), torch.ones(TOKENS, dtype=torch.int64)
    for slots in (0 * ones, ones, 2 * ones):
        attention.append(threads, slots, places, keys[None], keys[None], compressed_keys[None])
    at = torch.tensor([*range(1020, 1029), *range(2), *range(2042, 2056), 2590])
    slots = torch.tensor([0] * 9 + [1] * 2 + [2] * (len(at) - 11))
    query = draw(heads, len(at), 32, seed=5)
    chosen = torch.stack([torch.randperm(256)[:9].sort().values for _ in at]).int()
    chosen[::3] = -1  # sees all
    for selected in (None, chosen):
        together = attention.attend(threads, slots, at, query, selected)
        for token in range(len(at)):
            one = slice(token, token + 1)
            own = None if selected is None else selected[one]
            where = threads, slots[one], at[one]
            alone = attention.attend(*where, query[:, one], own)
            assert torch.equal(alone[0], together[token])


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8"])
def test_a_ring_gives_what_all_positions_give(threads: CpuThreads, kv_dtype: str) -> None:
    """A ring stores a position at its remainder; compressed keys are stored as before."""
    whole, ring = (
        attention_of(32, torch.float32, None, kv_dtype, capacity=n)[0] for n in (TOKENS, 128)
    )
    keys, compressed_keys = (draw(1, 700, 32, seed=n) for n in (1, 2))
    query, done = draw(5, 700, 32, seed=3), 0
    for count in (100, 1, 1, 60, 90, 3, 106, 106, 1, 1, 105, 26, 100):
        some = slice(done, done + count)
        at, slots = torch.arange(some.start, some.stop), torch.zeros(count, dtype=torch.int64)
        found = []
        for attention in (whole, ring):
            attention.append(
                threads, slots, at, keys[:, some], keys[:, some], compressed_keys[:, some]
            )
            found.append(attention.attend(threads, slots, at, query[:, some]))
        assert torch.equal(*found)
        done += count
    assert done == 700


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8"])
def test_what_was_not_written_is_never_heard(threads: CpuThreads, kv_dtype: str) -> None:
    attention, kept = attention_of(24, torch.float32, None, kv_dtype)
    for memory in (attention.keys, attention.values, kept.memory):
        memory.fill_(255)  # NaN, if it were read
    keys = draw(9, 24)
    at, slots = torch.arange(9), torch.ones(9, dtype=torch.int64)
    attention.append(threads, slots, at, keys[None], keys[None], keys[None])
    out = attention.attend(threads, slots, at, draw(5, 9, 24))
    assert out.isfinite().all()


@pytest.mark.parametrize(("slot", "position"), [(3, 3), (0, TOKENS + 300), (0, -1)])
def test_keys_outside_their_memory_are_refused(
    threads: CpuThreads, slot: int, position: int
) -> None:
    attention, _ = attention_of(24, torch.float32, None)
    slots, at = torch.tensor([slot]), torch.tensor([position])
    key = torch.zeros(1, 1, 24)
    with pytest.raises(ValueError, match=r"expected position|compressed keys of a slot"):
        attention.append(threads, slots, at, key, key, key)
    with pytest.raises(ValueError, match=r"expected position|compressed keys of a slot"):
        attention.attend(threads, slots, at, torch.zeros(5, 1, 24))


def test_compressed_keys_come_where_there_are_some(threads: CpuThreads) -> None:
    attention, _ = attention_of(24, torch.float32, None)
    one, key = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, 24)
    with pytest.raises(ValueError, match="the layer has some"):
        attention.append(threads, one, one, key, key)
