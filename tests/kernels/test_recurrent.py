"""Tests of short convolutions and linear recurrences against Transformers' functions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.models.jamba import modeling_jamba as jamba
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from tandem.kernels.dense import CpuThreads
from tandem.kernels.recurrent import (
    Convolution,
    LayerState,
    Recurrence,
    RecurrenceForm,
    StateTokens,
    new_layer_state,
)
from tests.kernels.layers import draw

pytestmark = pytest.mark.every_isa


def tokens_of(lengths: dict[int, int], first: int = 0) -> StateTokens:
    """Return the tokens of slots, one slot after another, starting at position `first`."""
    slots = torch.tensor([slot for slot, n in lengths.items() for _ in range(n)]).long()
    positions = torch.cat([torch.arange(first, first + n) for n in lengths.values()])
    return StateTokens(slots, positions)


def in_parts(layer: LayerState, threads: CpuThreads, *inputs: Tensor, cuts: list[int]) -> Tensor:
    """Advance slot 1 by all tokens in several calls."""
    outputs = []
    for first, end in zip([0, *cuts], [*cuts, len(inputs[0])], strict=True):
        tokens = tokens_of({1: end - first}, first)
        outputs.append(layer(threads, tokens, [x[first:end] for x in inputs]))
    return torch.cat(outputs)


def close(actual: Tensor, expected: Tensor, *, dtype: torch.dtype = torch.float32) -> None:
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert error < tolerance, float(error)


class Rule(NamedTuple):
    """An operation, its inputs, and the expected outputs by Transformers' function."""

    operation: Convolution | Recurrence
    inputs: list[Tensor]
    expected: Tensor


def convolution(
    num_tokens: int, channels: int, width: int, *, has_silu: bool, dtype: torch.dtype
) -> Rule:
    x = draw(num_tokens, channels, dtype=dtype)
    weight, bias = draw(channels, width, seed=1).to(dtype), draw(channels, seed=2).to(dtype)
    activation = "silu" if has_silu else None
    expected = qwen.causal_conv1d_fn(x.t()[None], weight, bias, activation=activation)[0].t()
    return Rule(Convolution(weight, bias, has_silu=has_silu), [x], expected)


def delta_inputs(
    n: int, keys: int, values: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    return {
        "query": draw(1, n, keys, key_dim, seed=1, dtype=dtype),
        "key": draw(1, n, keys, key_dim, seed=2, dtype=dtype),
        "value": draw(1, n, values, value_dim, seed=3, dtype=dtype),
        "g": -draw(1, n, values, seed=4).abs(),
        "beta": draw(1, n, values, seed=5, dtype=dtype).sigmoid(),
    }


def rows_of(inputs: dict[str, Tensor]) -> list[Tensor]:
    return [inputs[name][0] for name in ("value", "query", "key", "g", "beta")]


def gated_delta(
    num_tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32
) -> Rule:
    num_keys, num_values, key_dim, value_dim = shape
    inputs = delta_inputs(num_tokens, *shape, dtype)
    spread = {k: inputs[k].repeat_interleave(num_values // num_keys, 2) for k in ("query", "key")}
    expected, _ = qwen.torch_recurrent_gated_delta_rule(
        **{**inputs, **spread},
        initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    form = RecurrenceForm(
        num_values, num_keys, key_dim, value_dim, "head",
        is_delta=True, is_normalised=True, scale=key_dim**-0.5,
    )  # fmt: skip
    return Rule(Recurrence(form), rows_of(inputs), expected[0])


def kimi_delta() -> Rule:
    inputs = delta_inputs(20, 3, 3, 32, 24, torch.float32)
    inputs["g"] = -draw(1, 20, 3, 32, seed=4).abs()
    expected, _ = kimi.recurrent_kimi_delta_attention(
        **inputs, initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    form = RecurrenceForm(3, 3, 32, 24, "key", is_delta=True, is_normalised=True, scale=32**-0.5)
    return Rule(Recurrence(form), rows_of(inputs), expected[0])


def mamba_2() -> Rule:
    x, dt = draw(1, 20, 6, 24), draw(1, 20, 6, seed=1).exp()
    a, skip = -draw(6, seed=2).abs(), draw(6, seed=3)
    b, c = draw(1, 20, 2, 16, seed=4), draw(1, 20, 2, 16, seed=5)
    expected: Any = nemotron.mamba2_chunk_scan(x, dt, a, b, c, chunk_size=4, D=skip)
    spread = skip[:, None].expand(6, 24).contiguous()
    operation = Recurrence(RecurrenceForm(6, 2, 16, 24, "head"), skip=spread)
    return Rule(operation, [x[0], c[0], b[0], (dt * a)[0], dt[0]], expected[0])


def mamba() -> Rule:
    x, dt = draw(1, 40, 20), draw(1, 40, 20, seed=1).exp()
    a, b, c = -draw(40, 16, seed=2).abs(), draw(1, 16, 20, seed=4), draw(1, 16, 20, seed=5)
    expected: Any = jamba.mamba_selective_scan(x, dt, a, b, c)
    value, query, key, rate = (part[0].t().contiguous() for part in (x * dt, c, b, dt))
    inputs = [value[:, None], query[:, None], key[:, None], rate]
    operation = Recurrence(RecurrenceForm(1, 1, 16, 40, "pair"), factor=a)
    return Rule(operation, inputs, expected[0].t()[:, None])


def require(rule: Rule, threads: CpuThreads, *cuts: list[int]) -> None:
    """Assert Transformers' outputs, equal bits for any chunks, and unchanged idle slots."""
    layer = new_layer_state(3, rule.operation)
    outputs = [in_parts(layer, threads, *rule.inputs, cuts=where) for where in ([], *cuts)]
    close(outputs[0], rule.expected, dtype=rule.expected.dtype)
    assert all(torch.equal(outputs[0], other) for other in outputs)
    assert not layer.states[::2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_silu", [True, False])
@pytest.mark.parametrize(("channels", "width"), [(64, 4), (200, 3), (7, 2), (1030, 4)])
def test_convolutions(
    channels: int, width: int, *, has_silu: bool, dtype: torch.dtype, threads: CpuThreads
) -> None:
    rule = convolution(9, channels, width, has_silu=has_silu, dtype=dtype)
    require(rule, threads, [1], [2, 3, 8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(2, 4, 16, 16), (1, 1, 128, 128), (2, 2, 33, 20), (3, 6, 8, 40), (1, 2, 16, 84)]
)
def test_the_gated_delta_rule(
    shape: tuple[int, int, int, int], dtype: torch.dtype, threads: CpuThreads
) -> None:
    require(gated_delta(150, shape, dtype), threads, [1], [5, 6, 140])


@pytest.mark.parametrize("make_rule", [kimi_delta, mamba_2, mamba])
def test_other_rules(make_rule: Callable[[], Rule], threads: CpuThreads) -> None:
    require(make_rule(), threads, [1, 7])


def test_slots_do_not_disturb_each_other(threads: CpuThreads) -> None:
    form = RecurrenceForm(2, 2, 16, 16, "head", is_delta=True)
    inputs = rows_of(delta_inputs(12, 2, 2, 16, 16, torch.float32))
    layer, alone = new_layer_state(4, Recurrence(form)), new_layer_state(4, Recurrence(form))
    together = layer(threads, tokens_of({3: 5, 0: 7}), inputs)
    first = alone(threads, tokens_of({3: 5}), [x[:5] for x in inputs])
    second = alone(threads, tokens_of({0: 7}), [x[5:] for x in inputs])
    assert torch.equal(together, torch.cat([first, second]))
    assert torch.equal(layer.states, alone.states)
    # a slot that is taken again begins with zeros
    assert torch.equal(layer(threads, tokens_of({3: 5}), [x[:5] for x in inputs]), first)


def layers_of_all_kinds() -> dict[str, tuple[LayerState, list[Tensor]]]:
    """Return layers of each kind for two slots, with inputs for 12 tokens."""
    delta = delta_inputs(12, 2, 4, 16, 20, torch.bfloat16)
    kimi_delta = delta_inputs(12, 3, 3, 16, 24, torch.float32)
    kimi_delta["g"] = -draw(1, 12, 3, 16, seed=4).abs()
    forms = {
        "head": RecurrenceForm(4, 2, 16, 20, "head", is_delta=True, is_normalised=True, scale=0.5),
        "key": RecurrenceForm(3, 3, 16, 24, "key", is_delta=True, is_normalised=True),
        "pair": RecurrenceForm(1, 1, 16, 40, "pair"),
    }
    pairs = [draw(12, 1, n, seed=n) for n in (40, 16, 16)]
    return {
        "convolution": (
            new_layer_state(2, Convolution(draw(300, 4, seed=1), draw(300), has_silu=True)),
            [draw(12, 300)],
        ),
        "head": (new_layer_state(2, Recurrence(forms["head"])), rows_of(delta)),
        "key": (new_layer_state(2, Recurrence(forms["key"])), rows_of(kimi_delta)),
        "pair": (
            new_layer_state(2, Recurrence(forms["pair"], factor=-draw(40, 16, seed=2).abs())),
            [*pairs, draw(12, 40, seed=3).exp()],
        ),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["convolution", "head", "key", "pair"])
def test_drafted_tokens_are_taken_back(kind: str, threads: CpuThreads) -> None:
    """Outputs and final states are bit-identical to those of single tokens."""
    layer, inputs = layers_of_all_kinds()[kind]
    expected = in_parts(layer, threads, *inputs, cuts=[*range(1, 12)])
    state = layer.states[1].clone()
    # Tokens of each call, and how many of them are kept.
    for calls in ([(8, 8), (4, 4)], [(3, 1), (4, 2), (1, 1), (8, 8)], [(8, 5), (2, 1), (6, 6)]):
        done, outputs = 0, []
        for count, kept in calls:
            tokens = tokens_of({1: count}, done)._replace(have_drafts=True)
            out = layer(threads, tokens, [x[done : done + count] for x in inputs])
            outputs.append(out[:kept])
            layer.kept[1] = kept - 1
            done += kept
        assert torch.equal(torch.cat(outputs), expected)
        layer(threads, tokens_of({1: 1}, done)._replace(have_drafts=True), [x[:1] for x in inputs])
        beyond = layer.states[1].clone()
        in_parts(layer, threads, *inputs, cuts=[])
        layer(threads, tokens_of({1: 1}, done), [x[:1] for x in inputs])
        assert torch.equal(layer.states[1], beyond)
        assert not layer.kept.any()
        assert not layer.states[0].any()
    in_parts(layer, threads, *inputs, cuts=[])
    assert torch.equal(layer.states[1], state)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_none_and_one_token(num_tokens: int, threads: CpuThreads) -> None:
    layer = new_layer_state(1, Convolution(draw(8, 4), None, has_silu=True))
    out = layer(threads, tokens_of({0: num_tokens}), [draw(num_tokens, 8)])
    assert out.shape == (num_tokens, 8)


def test_what_the_kernels_cannot_read_is_refused(threads: CpuThreads) -> None:
    layer = new_layer_state(1, Convolution(draw(8, 4), None, has_silu=True))
    with pytest.raises(TypeError, match="gaps"):
        layer(threads, tokens_of({0: 2}), [draw(8, 2).t()])
    with pytest.raises(ValueError, match="over 17 tokens"):
        new_layer_state(1, Convolution(draw(8, 17), None, has_silu=True))


def test_values_that_are_not_finite_stay_so(threads: CpuThreads) -> None:
    inputs: list[Any] = rows_of(delta_inputs(3, 1, 1, 16, 16, torch.float32))
    inputs[0][1, 0, 3] = float("nan")
    form = RecurrenceForm(1, 1, 16, 16, "head", is_delta=True)
    out = new_layer_state(1, Recurrence(form))(threads, tokens_of({0: 3}), inputs)
    assert out[0].isfinite().all()
    assert out[2, 0, 3].isnan()
