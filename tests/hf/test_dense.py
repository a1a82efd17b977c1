"""Packed dense layers inside models: near the original, the router untouched, saved as weights."""

from typing import Any

import pytest
import torch

from tandem.core.errors import ConfigError
from tandem.generate.generator import Generator
from tandem.hf.dense import PackedLinear, find_dense_format, pack_dense_layers
from tandem.hf.rows import CachedRows
from tandem.kernels.dense import CpuThreads
from tests.architectures import build_tiny_model, result_of, tiny_inputs


@pytest.fixture(autouse=True)
def pack_small_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.hf.dense._LEAST_WEIGHTS", 1)


@pytest.fixture(scope="module")
def threads() -> CpuThreads:
    return CpuThreads(num_threads=2)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return result_of(model(**tiny_inputs(model)))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen2_moe", "qwen3_next"])
def test_packed_models_are_near_and_route_as_before(name: str, threads: CpuThreads) -> None:
    model: Any = build_tiny_model(name)
    before = logits_of(model)
    # fp16 rounds so little that no router flips
    assert pack_dense_layers(model, "fp16", threads) > 0
    kinds = {
        path.rpartition(".")[2] for path, m in model.named_modules() if isinstance(m, PackedLinear)
    }
    assert "lm_head" in kinds
    assert {"o_proj", "out_proj"} & kinds
    assert not {"gate", "router"} & kinds
    error = (logits_of(model) - before).norm() / before.norm()
    assert 0 < error < 0.005


def test_int8_costs_percents(threads: CpuThreads) -> None:
    model: Any = build_tiny_model("qwen3_moe")
    before = logits_of(model)
    pack_dense_layers(model, "int8-g32", threads)
    error = (logits_of(model) - before).norm() / before.norm()
    assert 0.001 < error < 0.05


def test_replayed_steps_use_packed_layers_together(threads: CpuThreads) -> None:
    model: Any = build_tiny_model("qwen3_moe")
    pack_dense_layers(model, "int8-g32", threads)
    tokens = [50, 61, 72, 83, 94, 105]
    logits = []
    for has_replay in (True, False):
        rows = CachedRows(model, threads, [[40, 41], [42]], 8, has_replay=has_replay)
        rows.prefill()
        logits.append([rows.decode([token, token + 1]) for token in tokens])
        assert rows.step.is_replaying is has_replay
    for a, b in zip(*logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_packed_models_state_has_the_names_of_the_original(threads: CpuThreads) -> None:
    model, original = build_tiny_model("qwen3_moe"), build_tiny_model("qwen3_moe")
    pack_dense_layers(model, "int8-g32", threads)
    state, expected = model.state_dict(), original.state_dict()
    assert set(state) == set(expected)
    original.load_state_dict(state)
    error = (logits_of(original) - logits_of(model)).norm() / logits_of(model).norm()
    assert error < 0.05  # the same weights; here the activations are not rounded


def test_packed_models_generate(threads: CpuThreads) -> None:
    model: Any = build_tiny_model("mixtral")
    pack_dense_layers(model, "bf16", threads)
    (answer,) = Generator(model, threads=threads).generate([40, 41, 42], max_new_tokens=5)
    assert answer.token_ids


def test_an_unknown_dense_dtype_gets_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"dense_dtype is 'int5'.*did you mean"):
        find_dense_format("int5")
