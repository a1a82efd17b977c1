"""Tests of looking ahead: finding routers, predictions with and without residual, calibration."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import tandem
from tandem.bench.routing_recording import recording
from tandem.core.errors import ConfigError, FileFormatError, UnsupportedModelError
from tandem.decode.cpu_slots import CpuSlotPool
from tandem.decode.cuda.slots import CudaSlotPool
from tandem.experts.tracing.cache_statistics import CacheStatistics
from tandem.hf.lookahead.linear_routers import linear_routers
from tandem.hf.lookahead.look_ahead import LookAhead, look_ahead
from tandem.hf.lookahead.residuals import Residuals
from tandem.hf.lookahead.routers import find_routers
from tandem.policy.plan import Hint
from tests.architectures import architectures, build_tiny_model, tiny_inputs
from tests.conftest import two_threads
from tests.decode.twin_capture import TwinCapture
from tests.hf.test_hybrid import load, recorded, replayed
from tests.inside import runtime_in


def tiny(name: str, folder: Path) -> Any:
    build_tiny_model(name).save_pretrained(folder)
    return tandem.load(folder, dtype="float32")


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe"])
def test_a_router_run_on_its_own_input_repeats_its_choice(name: str, tmp_path: Path) -> None:
    model = tiny(name, tmp_path)
    routers = find_routers(model, runtime_in(model).bound)
    assert not isinstance(routers, str), routers
    read: list[torch.Tensor] = []
    for router in routers:
        router.module.register_forward_pre_hook(lambda module, args: read.append(args[0].clone()))
    with recording(model) as recorder, torch.no_grad():
        recorder.begin_sequences()
        model(**tiny_inputs(model))
        trace = recorder.trace(name)
    read = read[-len(routers) :]  # earlier calls belong to the search for the routers
    for layer, router in enumerate(routers):
        with torch.no_grad():
            choice = router.choose(read[layer]).numpy()
        assert (choice == trace.experts[:, layer]).all()


@pytest.mark.parametrize(
    ("name", "scoring"),
    [("qwen3_moe", ""), ("gpt_oss", ""), ("deepseek_v3", None), ("deepseek_v4", "sqrtsoftplus")],
)
def test_routers_that_choose_the_largest_of_a_product_are_found(
    name: str, tmp_path: Path, scoring: str | None
) -> None:
    """DeepSeek-V3 chooses groups first; DeepSeek-V4 adds a bias after a function."""
    model = tiny(name, tmp_path)
    for key, values in (*model.named_parameters(), *model.named_buffers()):
        if key.endswith(("e_score_correction_bias", "router.bias")):
            values.data.normal_(generator=torch.Generator().manual_seed(0))
    routers = find_routers(model, runtime_in(model).bound)
    assert not isinstance(routers, str), routers
    found = linear_routers(routers)
    assert (found is not None) == (scoring is not None)
    products = [router for router in found or () if router is not None]
    assert all((router.bias is not None) == (name != "qwen3_moe") for router in products)
    assert all(router.scoring == scoring for router in products)
    if name == "deepseek_v4":
        assert found is not None
        assert [not router for router in found] == [router.reads_tokens for router in routers]
        assert 0 < len(products) < len(routers)


def test_a_router_that_reads_token_ids_is_predicted_exactly(tmp_path: Path) -> None:
    config = build_tiny_model("deepseek_v4").config
    config.mlp_layer_types = ["hash_moe"] * len(config.mlp_layer_types)
    hashed = AutoModelForCausalLM.from_config(config)
    for name, table in hashed.named_buffers():
        if name.endswith("tid2eid"):  # each token has its own experts, different in every layer
            scores = torch.rand(len(table), config.num_local_experts)
            table.copy_(scores.topk(table.shape[1]).indices)
    hashed.save_pretrained(tmp_path)
    model = tandem.load(tmp_path, dtype="float32")
    routers = find_routers(model, runtime_in(model).bound)
    assert not isinstance(routers, str), routers
    exact = [layer for layer, router in enumerate(routers) if layer and router.reads_tokens]
    with recording(model) as recorder, torch.no_grad():
        recorder.begin_sequences()
        model(**tiny_inputs(model))
        trace = recorder.trace("deepseek_v4")
    assert routers[0].reads_tokens
    assert trace.meta.by_token == (*range(len(routers)),)
    assert trace.predicted is not None
    for layer in exact:
        for place in range(len(trace.meta.predictors)):
            predicted = np.sort(trace.predicted[:, layer, place])
            assert (predicted == np.sort(trace.experts[:, layer])).all()
    assert exact


def test_every_architecture_is_looked_into_without_an_error(tmp_path: Path) -> None:
    found, refused = [], {}
    for name in architectures()[::6]:
        model = tiny(name, tmp_path / name)
        routers = find_routers(model, runtime_in(model).bound)
        if isinstance(routers, str):
            refused[name] = routers
        else:
            found.append(name)
    assert found
    assert all(reason for reason in refused.values())


def test_residuals_are_the_mean_difference_of_router_inputs() -> None:
    residuals = Residuals(2, 3)
    first, second = torch.randn(5, 3), torch.randn(5, 3)
    residuals.learn(0, first, second)
    more, following = torch.randn(2, 3), torch.randn(2, 3)
    residuals.learn(0, more, following)
    expected = torch.cat([second - first, following - more]).mean(0)
    torch.testing.assert_close(residuals.means[0], expected)


def test_fixed_residuals_do_not_learn(tmp_path: Path) -> None:
    residuals = Residuals(2, 3)
    residuals.learn(0, torch.zeros(1, 3), torch.ones(1, 3))
    residuals.save(tmp_path / "r.npz", "me")
    fixed = Residuals.load(tmp_path / "r.npz", "me", 2, 3)
    fixed.learn(0, torch.zeros(1, 3), 9 * torch.ones(1, 3))
    assert fixed.means.tolist() == [[1, 1, 1]]


def test_residuals_of_another_model_or_no_residuals_are_refused(tmp_path: Path) -> None:
    Residuals(2, 3).save(tmp_path / "r.npz", "me")
    for identity, size in (("you", 3), ("me", 4)):
        with pytest.raises(ConfigError, match=r"residual vectors .* of model 'me', and this is"):
            Residuals.load(tmp_path / "r.npz", identity, 2, size)
    (tmp_path / "r.npz").write_bytes(b"nothing")
    with pytest.raises(FileFormatError, match="found no residual vectors"):
        Residuals.load(tmp_path / "r.npz", "me", 2, 3)


@pytest.mark.parametrize("prediction", ["gate", "residual", "regression"])
def test_hints_are_planned_with_and_replay_exactly(
    checkpoint: Path, profile: str, prediction: str
) -> None:
    options = {"prediction": prediction, "prefetch": "top-k", "prefetch_count": 3}
    options |= {"gpu_memory": "600kB", "look_ahead": prediction == "regression"}
    model = load(checkpoint, profile, **options)
    executor = runtime_in(model).executor
    assert isinstance(executor.look_ahead, LookAhead)
    resident = list(executor.cache.resident())
    statistics = CacheStatistics()
    executor.listeners.append(statistics)
    trace = recorded(model)
    assert trace.meta.predictors == ("gate", "residual")
    assert statistics.prefetch_issued > statistics.prefetch_useful > 0
    tally = replayed(trace, executor.cache, resident)
    assert (tally.hits, tally.copies, tally.prefetch_useful, tally.total_seconds) == (
        statistics.hits,
        statistics.copies,
        statistics.prefetch_useful,
        executor.cache.clock.now,
    )


@pytest.mark.parametrize("is_gpu", [False, True], ids=["recorded", "captured in segments"])
def test_steps_that_are_replayed_ask_as_the_models_own_code_does(
    checkpoint: Path, profile: str, *, is_gpu: bool
) -> None:
    """A twin of the GPU's steps needs no device for that."""
    model = load(checkpoint, profile, look_ahead=True, prediction="regression")
    executor = runtime_in(model).executor
    assert isinstance(executor.look_ahead, LookAhead)
    executor.look_ahead.residuals.is_fixed = True  # a step that is compared runs twice
    hinted: list[list[tuple[int, ...]]] = []

    def look_ahead(layer: int) -> Sequence[Hint]:
        hints = executor.look_ahead_itself(layer)
        if layer == 0:
            hinted.append([])
        hinted[-1].extend(hint.load.experts for hint in hints)
        return hints

    executor.look_ahead_itself, executor.look_ahead = executor.look_ahead, look_ahead
    found = []
    for has_replay in (True, False):
        pool: CpuSlotPool | CudaSlotPool
        if is_gpu:
            pool = CudaSlotPool(model, 1, make_capture=TwinCapture if has_replay else None)
        else:
            pool = CpuSlotPool(model, two_threads(), 1, has_replay=has_replay)
        pool.prefill({0: [40, 41, 42]})
        for token in (50, 61, 72, 83, 94):
            pool.decode({0: token})
        assert pool.step.is_replaying == has_replay, pool.step.why_not
        hinted.clear()
        logits = [pool.decode({0: token}).clone() for token in (105, 116, 41)]
        found.append((torch.cat(logits), [*hinted]))
    (ours, guesses), (theirs, expected) = found
    assert guesses == expected
    assert [len(of_step) for of_step in guesses] == [len(executor.store) - 1] * 3
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


def test_a_closed_executor_listens_no_more(checkpoint: Path, profile: str) -> None:
    model = load(checkpoint, profile, prediction="residual")
    found = find_routers(model, runtime_in(model).bound)
    assert not isinstance(found, str)
    routers = [router.module for router in found]
    assert all(len(router._forward_pre_hooks) == 1 for router in routers)
    model.close()
    assert all(len(router._forward_pre_hooks) == 0 for router in routers)


def test_a_model_whose_routers_cannot_be_run_ahead_is_refused(
    checkpoint: Path, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tandem.hf.lookahead.look_ahead.find_routers", lambda model, bound: "it is closed"
    )
    with pytest.raises(UnsupportedModelError, match="needs MixtralForCausalLM's routers, and it"):
        load(checkpoint, profile, prediction="residual")


def test_given_residuals_are_used_and_those_of_another_model_refused(
    checkpoint: Path, profile: str, tmp_path: Path
) -> None:
    path = tmp_path / "r.npz"
    Residuals(2, 64).save(path, "another model")
    with pytest.raises(ConfigError, match="of model 'another model'"):
        load(checkpoint, profile, prediction="residual", residuals=str(path))


def test_learning_makes_the_guess_more_like_the_truth(checkpoint: Path) -> None:
    model = tandem.load(checkpoint, dtype="float32")
    runtime = runtime_in(model)
    cache_path = checkpoint.parent / "nowhere"
    ahead = look_ahead(model, runtime.bound, runtime.store, (), cache_path=cache_path)
    assert isinstance(ahead, LookAhead)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(4):
            model(torch.randint(20, 100, (1, 60), generator=generator))
        ahead.cosines = []
        model(torch.randint(20, 100, (1, 60), generator=generator))
    ahead.close()
    assert all(corrected > plain for plain, corrected in ahead.cosines)
