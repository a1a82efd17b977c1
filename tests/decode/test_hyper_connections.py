"""Tests of residual streams in slots: modules and code of models become native operations."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.decode.cpu_slots import CpuSlotPool
from tandem.decode.substitutions import hyper_connections
from tandem.decode.substitutions.hyper_connections import _CpuStreams, _WayBack, _Weights
from tandem.kernels.dense import CpuThreads
from tandem.kernels.hyper_connections import mix_in, mix_out
from tandem.kernels.opaque_calls import MIX_IN, MIX_OUT
from tandem.recording.coverage import coverage_of
from tests.architectures import build_tiny_model
from tests.decode.whole_pool import require_alike

pytestmark = pytest.mark.every_isa(first_of="name")

# For each model: modules per layer that mix streams into an input, and known ways back;
# whether its output head is one of the former.
MODELS = {"deepseek_v4": (2, 2, 1), "glm5_next": (2, 2, 0), "hy_v4": (2, 0, 1)}
# Of one length, because the code of some models treats padding as part of a prompt.
PROMPTS = [[32 + (slot + i * 7) % 96 for i in range(37)] for slot in range(3)]


@pytest.mark.parametrize("name", MODELS)
def test_prompts_and_recorded_steps(
    name: str, threads: CpuThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and steps give Transformers' results, and each mixing is one native call."""
    called = Counter[str]()

    def counted(kind: str, function: Any, *args: Any) -> Any:
        called[kind] += 1
        return function(*args)

    for kind, function in ((MIX_IN, mix_in), (MIX_OUT, mix_out)):
        monkeypatch.setattr(hyper_connections, kind, partial(counted, kind, function))
    model: Any = build_tiny_model(name)
    into, back, heads = MODELS[name]
    num_layers = model.config.get_text_config().num_hidden_layers
    expected = {MIX_IN: num_layers * into + heads, MIX_OUT: num_layers * back}
    pool = CpuSlotPool(model, threads, 3)
    pool.prefill({0: PROMPTS[0]})
    assert called == Counter({kind: count for kind, count in expected.items() if count})
    pool.keep(0, 0)
    alike = require_alike(pool, model, PROMPTS)
    recording: Any = alike.step.recording
    native = coverage_of(recording).native
    assert {kind: native.get(kind, 0) for kind in expected} == expected


def weights_of(streams: Tensor, threads: CpuThreads) -> tuple[Any, Any, Tensor]:
    """Return modules that stand for the weights of outputs and mixtures, and these weights."""
    n = streams.shape[-2]
    weights = torch.rand(*streams.shape[:-2], n + n * n)
    back = _WayBack(_CpuStreams(threads), weights, streams)
    mixture = weights[..., n:].unflatten(-1, (n, n))
    return _Weights(weights[..., :n], back), _Weights(mixture, back), weights


def test_other_uses_of_weights_take_them_as_they_are(
    threads: CpuThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hyper_connections, "opaque", None)  # nothing is native
    streams, y = torch.randn(1, 3, 4, 24), torch.randn(1, 3, 24)
    post, comb, weights = weights_of(streams, threads)
    own, mixture = weights[..., :4], weights[..., 4:].unflatten(-1, (4, 4))
    added, mixed = own[..., None] * y[:, :, None], torch.matmul(mixture, streams)
    assert torch.equal(
        post.unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(comb, streams), added + mixed
    )
    assert torch.equal(post.unsqueeze(dim=-1) * y.unsqueeze(-2) + mixed, added + mixed)
    assert torch.equal(torch.sum(comb, dim=-1), mixture.sum(dim=-1))
    assert torch.equal(comb.to(torch.float32).flatten(1), mixture.flatten(1))
    assert torch.equal(y[0, 0, 0] * post, y[0, 0, 0] * own)
    other, _, others = weights_of(streams, threads)  # of another connection
    column = other.to(torch.float32).unsqueeze(-1) * y.unsqueeze(-2)
    turned = torch.matmul(comb.to(torch.float32).transpose(-1, -2), streams)
    expected = others[..., :4, None] * y[:, :, None] + mixture.transpose(-1, -2) @ streams
    assert torch.equal(column + turned, expected)
    column = post.to(torch.float32).unsqueeze(-1) * y.unsqueeze(-2)
    turned = torch.matmul(comb.to(torch.float32).transpose(-1, -2), streams.clone())
    torch.testing.assert_close(column + turned, added + mixture.transpose(-1, -2) @ streams)
