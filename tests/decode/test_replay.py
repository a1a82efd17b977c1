"""Tests of recorded decode steps, against the model's own; the others give a reason."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import tandem
from tandem.experts.execution.executor import CpuExecutor
from tandem.experts.execution.forced_routing import ForcedRouting
from tandem.experts.tracing.events import ExpertStatistics
from tandem.generate.generator import Generator
from tandem.recording.recorded_graph import RecordedGraph, record_step
from tandem.recording.replay import ReplayedStep
from tandem.trace import RoutingTrace, TraceMeta
from tests.architectures import build_tiny_model
from tests.conftest import two_threads
from tests.decode.whole_pool import cpu_pool
from tests.inside import runtime_in

pytestmark = pytest.mark.every_isa(first_of="name")

TOKENS = [50, 61, 72, 83, 94, 105, 116, 41]


def step_logits(model: Any, prompts: list[list[int]], *, has_replay: bool) -> list[torch.Tensor]:
    pool = cpu_pool(model, two_threads(), prompts, has_replay=has_replay)
    logits = [pool.prefill()]
    logits += [pool.decode([token] * len(prompts)).clone() for token in TOKENS]
    assert pool.step.is_replaying is has_replay, pool.step.why_not
    return logits


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v2", "gemma4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replayed_logits_equal_the_models(name: str, dtype: torch.dtype) -> None:
    model: Any = build_tiny_model(name).to(dtype)
    prompts = [[40, 41, 42], [60] * 9]
    replayed = step_logits(model, prompts, has_replay=True)
    for a, b in zip(replayed, step_logits(model, prompts, has_replay=False), strict=True):
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        assert (a.float() - b.float()).norm() <= tolerance * b.float().norm()


def test_a_replayed_step_survives_the_growth_of_the_kv_cache() -> None:
    model: Any = build_tiny_model("mixtral")
    model.generation_config.eos_token_id = None
    prompt = [40 + i % 70 for i in range(240)]  # the cache is made for 256 tokens

    def answer(*, has_replay: bool) -> list[int]:
        generator = Generator(model, has_replay=has_replay)
        generator.generate(prompt, max_new_tokens=1)
        return generator.generate(prompt, max_new_tokens=16)[0].token_ids

    model.config.max_position_embeddings = 4096
    generator = Generator(model)
    generator.generate([40, 41], max_new_tokens=10)  # recorded while the cache is small
    longer = generator.generate([45] * 700, max_new_tokens=10)[0].token_ids
    assert (
        longer
        == Generator(model, has_replay=False).generate([45] * 700, max_new_tokens=10)[0].token_ids
    )
    assert answer(has_replay=True) == answer(has_replay=False)


def counting_step(*, looks: bool, differs: bool) -> tuple[ReplayedStep, torch.Tensor]:
    x, calls = torch.zeros(4), [0]

    def step() -> torch.Tensor:
        calls[0] += 1
        y = x * 2 + 1
        if looks and float(y[0]) > 5:
            y = y * 10
        return y + (calls[0] if differs else 0)

    return ReplayedStep(step, partial(record_step, step, [x]), 1e-3), x


def test_a_step_that_looks_at_values_stays_the_models() -> None:
    step, x = counting_step(looks=True, differs=False)
    for i in range(8):
        x.fill_(i)
        assert step().tolist() == [i * 2 + 1 if i * 2 + 1 <= 5 else (i * 2 + 1) * 10] * 4
    assert step.why_not is not None
    assert "looks at values" in step.why_not


def test_a_step_that_changes_from_call_to_call_is_given_up() -> None:
    step, _ = counting_step(looks=False, differs=True)
    for _ in range(6):
        step()
    assert not step.is_replaying
    assert step.why_not == "its recording gives other logits"


def test_one_step_that_differs_is_the_models_and_does_not_end_it() -> None:
    x, calls = torch.zeros(4), [0]

    def step() -> torch.Tensor:
        calls[0] += 1
        return x + (1 if calls[0] == 3 else 0)  # as for a router that chooses between equal scores

    replayed = ReplayedStep(step, partial(record_step, step, [x]), 1e-3)
    results = []
    for i in range(1, 8):
        x.fill_(i)
        results.append(replayed()[0].item())
    assert replayed.is_replaying
    assert results == [1, 2, 4, 4, 5, 6, 7]


def test_a_steady_step_is_replayed_with_new_inputs() -> None:
    step, x = counting_step(looks=False, differs=False)
    for i in range(8):
        x.fill_(i)
        assert step().tolist() == [i * 2 + 1] * 4
    assert step.is_replaying


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def packed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, isa: str
) -> Any:
    folder = tmp_path_factory.mktemp("packed")
    build_tiny_model(request.param).save_pretrained(folder)
    return tandem.load(folder, dtype="float32", expert_dtype="fp16")


def test_replayed_experts_equal_the_executors_and_are_counted(packed: Any) -> None:
    prompts = [[40, 41, 42], [60] * 9]
    counts = []
    logits = []
    for has_replay in (True, False):
        pool = cpu_pool(packed, two_threads(), prompts, has_replay=has_replay)
        pool.prefill()
        for token in TOKENS[:5]:
            pool.decode([token, token + 1])
        statistics = ExpertStatistics()
        runtime_in(packed).executor.listeners.append(statistics)
        logits.append(pool.decode([TOKENS[5]] * 2).clone())
        runtime_in(packed).executor.listeners.remove(statistics)
        assert pool.step.is_replaying is has_replay
        counts.append(statistics)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)
    assert counts[0] == counts[1]
    assert counts[0].expert_rows > 0


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_a_forced_routing_is_replayed_in_programs(packed: Any, num_sequences: int) -> None:
    runtime, text = runtime_in(packed), packed.config
    inner, layers = runtime.executor, len(runtime.store)
    num_experts = runtime.store[0].arrivals.num_experts
    random = np.random.default_rng(0)
    experts = random.random((50, layers, num_experts)).argsort(-1)[..., : text.num_experts_per_tok]
    trace = RoutingTrace(
        meta=TraceMeta(
            model="made up", n_moe_layers=layers, n_experts=num_experts, top_k=experts.shape[-1]
        ),
        experts=experts.astype(np.uint8),
        weights=random.random(experts.shape).astype(np.float16),
        seq_offsets=np.array([0, 50]),
    )
    prompts = [[40, 41, 42]] * num_sequences
    free = step_logits(packed, prompts, has_replay=True)
    try:
        runtime.use(ForcedRouting(inner, trace))
        replayed = step_logits(packed, prompts, has_replay=True)
        runtime.use(ForcedRouting(inner, trace))
        stepped = step_logits(packed, prompts, has_replay=False)
    finally:
        runtime.use(inner)
    for a, b in zip(replayed, stepped, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(replayed[-1], free[-1], rtol=1e-2)


def test_another_executor_is_recorded_anew(packed: Any) -> None:
    class Counting(CpuExecutor):
        calls = 0

        def execute(self, *args: Any) -> torch.Tensor:
            Counting.calls += 1
            return super().execute(*args)

    pool = cpu_pool(packed, two_threads(), [[40, 41, 42]])
    pool.prefill()
    for token in TOKENS:
        pool.decode([token])
    runtime = runtime_in(packed)
    before = runtime.executor
    runtime.use(Counting(before.store))
    try:
        for token in TOKENS:
            pool.decode([token])
        assert pool.step.is_replaying
        so_far = Counting.calls
        pool.decode([50])
        assert Counting.calls > so_far  # a subclass is not treated as CpuExecutor
    finally:
        runtime.use(before)


def test_routers_in_fp32_of_bf16_models_are_native_too() -> None:
    model: Any = build_tiny_model("deepseek_v2").to(torch.bfloat16)
    pool = cpu_pool(model, two_threads(), [[40, 41, 42]])
    pool.prefill()
    for token in TOKENS:
        pool.decode([token])
    recorded = pool.step.recording
    assert isinstance(recorded, RecordedGraph)
    names = [operation.name for operation, _ in recorded.profile(1)]
    assert "dense" in names
    assert "linear" not in names
