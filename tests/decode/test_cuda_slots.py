"""Tests of the GPU's KV cache and captured steps on the CPU, with the twin of CUDA's graphs."""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import tandem
from tandem.core.errors import CapacityError
from tandem.decode.cuda.slots import CudaSlotPool
from tandem.decode.padded import PaddedBatch
from tandem.experts.execution.executor import CpuExecutor
from tandem.experts.tracing.events import LayerExecuted
from tandem.generate.generator import Generator
from tandem.generate.request import Request
from tandem.generate.sampling import SamplingOptions
from tandem.hf.experts import bind_all
from tests.decode.test_states import LONG
from tests.decode.twin_capture import TwinCapture
from tests.decode.whole_pool import close, cuda_pool, logits_of
from tests.hf.tiny import save_tiny_checkpoint, save_tiny_dense
from tests.inside import runtime_in

# Full attention; windows and sinks; a latent; windows, softcaps and several kinds of layers.
NAMES = ("mixtral", "gpt_oss", "deepseek_v2", "gemma4")
DENSE = "qwen3"  # no experts, so that a step is one piece
TOKENS = [50, 61, 72, 83, 94, 105, 116, 41]
PROMPTS = [[40, 41, 42], [60] * 9]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("models")
    found = {
        name: tandem.load(save_tiny_checkpoint(directory / name, name), dtype="float32")
        for name in NAMES
    }
    return found | {DENSE: tandem.load(save_tiny_dense(directory / DENSE, DENSE), dtype="float32")}


@pytest.mark.parametrize("name", [*NAMES, DENSE])
def test_captured_pieces_give_the_models_logits(models: dict[str, Any], name: str) -> None:
    model = models[name]
    events: list[LayerExecuted] = []
    executor = runtime_in(model).executor
    executor.listeners.append(events.append)
    pool = cuda_pool(model, PROMPTS, 20, make_capture=TwinCapture)
    found = logits_of(pool, 2, TOKENS)
    executor.listeners.clear()
    assert pool.step.is_replaying, pool.step.why_not
    num_layers = len(runtime_in(model).store)
    assert pool.num_segments == num_layers + 1
    # Experts run between the segments; captured results of the comparison are not used.
    assert len(events) == num_layers * (len(PROMPTS) + len(TOKENS))
    for ours, theirs in zip(
        found, logits_of(PaddedBatch(model, PROMPTS, 0), 2, TOKENS), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


def test_a_longer_reach_and_a_larger_cache_are_captured_anew(models: dict[str, Any]) -> None:
    model = models["mixtral"]
    prompt = [40 + i % 70 for i in range(250)]
    plain, graphed = (
        cuda_pool(model, [prompt], 4, make_capture=capture) for capture in (None, TwinCapture)
    )
    torch.testing.assert_close(graphed.prefill(), plain.prefill())
    pieces = []
    for step in range(20):  # exceeds 256 tokens: another attended length, more than reserved
        ours, theirs = graphed.decode([40 + step]), plain.decode([40 + step])
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)
        pieces.append((graphed.cache.attended_length, graphed.step.is_replaying))
    assert (256, True) in pieces
    assert (512, True) in pieces


def test_a_longer_conversation_reuses_what_the_cache_holds(models: dict[str, Any]) -> None:
    model = models["mixtral"]
    pool = cuda_pool(model, [[40, 41, 42, 43]], 20, make_capture=TwinCapture)
    pool.prefill()
    for token in TOKENS:
        pool.decode([token])
    longer = [40, 41, 42, 43, *TOKENS[:5], 99, 98]
    pool.continue_with([longer])
    assert pool.reused_tokens == [9]
    fresh = cuda_pool(model, [longer], 20)
    torch.testing.assert_close(pool.prefill(), fresh.prefill(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pool.decode([77]), fresh.decode([77]), rtol=1e-4, atol=1e-4)


def test_a_kv_cache_that_cannot_grow_goes_on_as_it_is(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = cuda_pool(models["mixtral"], [[40, 41, 42]], 4)
    pool.prefill()
    expected, capacity, zeros = pool.decode([50]).clone(), pool.cache.capacity, torch.zeros
    made = []

    def scarce(*args: Any, **options: Any) -> torch.Tensor:
        made.append(args)
        if len(made) > 1:  # memory for some of the layers
            raise torch.OutOfMemoryError("made up")
        return zeros(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", scarce)
        with pytest.raises(CapacityError, match=f"1 slots of {2 * capacity} tokens"):
            pool.cache.reserve(capacity + 1)
    assert pool.cache.capacity == capacity
    pool.continue_with([[40, 41, 42, 50, 51]])
    pool.cache.lengths[0] = 3
    torch.testing.assert_close(pool.decode([50]), expected)


def test_the_memory_that_lacks_is_named(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, zeros = cuda_pool(models["mixtral"], [[40, 41, 42]], 4), torch.zeros

    def scarce(shape: Any, **options: Any) -> torch.Tensor:
        if shape == (5,):  # a layer's addresses
            raise torch.OutOfMemoryError("made up")
        return zeros(shape, **options)

    monkeypatch.setattr(torch, "zeros", scarce)
    with pytest.raises(CapacityError, match="no memory for 40 B of sequence slots"):
        pool.prefill()


def test_rows_that_nobody_has_any_more_make_room_before_experts_do(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, zeros = models["mixtral"], torch.zeros
    earlier = cuda_pool(model, PROMPTS, 4, make_capture=TwinCapture)
    logits_of(earlier, 2, TOKENS)
    held = weakref.ref(earlier)
    pool = cuda_pool(model, [[40, 41, 42]], 4)
    pool.cache._make_room = lambda: pytest.fail("experts were to make room")

    def scarce(*args: Any, **options: Any) -> torch.Tensor:
        if held() is not None:
            raise torch.OutOfMemoryError("made up")
        return zeros(*args, **options)

    gc.disable()
    try:
        del earlier
        monkeypatch.setattr(torch, "zeros", scarce)
        pool.prefill()
    finally:
        gc.enable()
    assert held() is None


@pytest.fixture(scope="module", params=["mixtral", "qwen3_5_moe", "jamba"])
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with keys and values only, and models with two kinds of states."""
    directory = save_tiny_checkpoint(tmp_path_factory.mktemp("any"), request.param)
    model = tandem.load(directory, dtype="float32")
    model.generation_config.eos_token_id = None
    return model


def test_slots_are_stepped_in_any_company(any_model: Any) -> None:
    """Sequences give the same tokens together as alone; slots without a token are unchanged."""
    model, texts = any_model, {0: [40, 41, 42], 1: [60] * 5, 3: LONG[:70]}
    alone = {slot: CudaSlotPool(model, 1) for slot in texts}
    pool = CudaSlotPool(model, 4, make_capture=TwinCapture)
    for slot, text in texts.items():
        close(pool.prefill({slot: text}), alone[slot].prefill({0: text}))
    events: list[LayerExecuted] = []
    top_k = model.config.get_text_config().num_experts_per_tok
    for turn, batch in enumerate([(0,), (0, 1), (0, 1, 3), (3,), (1, 3)] * 5):
        runtime_in(model).executor.listeners.append(events.append)
        logits = pool.decode({slot: 40 + (turn + slot) % 50 for slot in batch})
        runtime_in(model).executor.listeners.clear()
        assert events[-1].num_expert_rows == len(batch) * top_k  # padding tokens choose no expert
        for slot, ours in zip(batch, logits, strict=True):
            close(ours[None], alone[slot].decode({0: 40 + (turn + slot) % 50}))
    assert {key[0] for key, step in pool._steps.by_size.items() if step.replayed.is_replaying} == {
        1,
        2,
        4,
    }
    assert all(list(pool.held(slot)[: len(text)]) == text for slot, text in texts.items())


def scheduled_answers(
    generator: Generator, prompts: Sequence[Sequence[int]], *, chunk_tokens: int
) -> tuple[dict[int, list[int | None]], int]:
    """Answer on three slots; return each request's tokens and number of reused prompt tokens."""
    scheduler = generator.scheduler(3, chunk_tokens=chunk_tokens)
    tokens: dict[int, list[int | None]] = {}
    for number, prompt in enumerate(prompts):
        options = SamplingOptions(max_new_tokens=8 + 3 * number, temperature=0)
        scheduler.add(Request(request_id=number, prompt=tuple(prompt), options=options))
    while scheduler.has_work:
        for progress in scheduler.step():
            tokens.setdefault(progress.request_id, []).append(progress.token_id)
    return tokens, scheduler.counts.reused_tokens


def test_requests_are_answered_alike_on_both_pools(
    any_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the server's loop: five requests, three slots, chunked prompts, reused prefixes."""
    prompts = [LONG[:150], [*LONG[:145], 60, 61], [70] * 3, [*LONG[:100], 90], [50, 51, 52]]

    expected = scheduled_answers(Generator(any_model, has_replay=False), prompts, chunk_tokens=40)
    generator = Generator(any_model, has_replay=False)
    pool = CudaSlotPool(any_model, 3, make_capture=TwinCapture)
    monkeypatch.setattr(generator, "slot_pool", lambda num_slots: pool)
    assert scheduled_answers(generator, prompts, chunk_tokens=40) == expected
    assert expected[1] > 0
    assert any(step.replayed.is_replaying for step in pool._steps.by_size.values())


def test_all_logits_of_a_prompt_end_with_those_of_its_last_token(models: dict[str, Any]) -> None:
    text = [40 + i % 9 for i in range(7)]
    pool = CudaSlotPool(models["mixtral"], 2, make_capture=TwinCapture)
    last = pool.prefill({0: text})[0].clone()
    every = pool.prefill_with_logits(1, text)
    assert len(every) == len(text)
    torch.testing.assert_close(every[-1], last)
    assert list(pool.held(1)) == text


def test_each_step_is_announced_once_with_the_tokens_of_its_rows(models: dict[str, Any]) -> None:
    runtime = runtime_in(models["mixtral"])
    announced: list[tuple[list[int], bool]] = []

    class Executor(CpuExecutor):
        def begin_step(self, token_ids: Sequence[int], *, is_prefill: bool) -> None:
            announced.append((list(token_ids), is_prefill))

    before = runtime.executor
    runtime.use(Executor(runtime.store))
    try:
        pool = CudaSlotPool(models["mixtral"], 4, make_capture=TwinCapture)
        for row in (0, 2):
            pool.prefill({row: [40, 41, 42]})
        for _ in range(6):
            pool.decode({0: 50, 2: 60})
    finally:
        runtime.use(before)
    assert announced == [([40, 41, 42], True)] * 2 + [([50, 60], False)] * 6


def test_a_row_goes_on_with_what_another_holds(models: dict[str, Any]) -> None:
    pool = CudaSlotPool(models["gpt_oss"], 2)
    prompt = [40, 41, 42, 43, 44]
    expected = pool.prefill({0: prompt})[0].clone()
    pool.copy(0, 1, 3)
    assert list(pool.held(1)) == prompt[:3]
    torch.testing.assert_close(pool.prefill({1: prompt[3:]})[0], expected, rtol=1e-4, atol=1e-4)
    pool.keep(0, 2)
    torch.testing.assert_close(pool.prefill({0: prompt[2:]})[0], expected, rtol=1e-4, atol=1e-4)
    assert pool.num_bytes > 0


def test_a_prompt_without_memory_lets_experts_make_room(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, room = models["mixtral"], [2, 1]
    pool = CudaSlotPool(model, 1)
    expected = pool.prefill({0: [40, 41, 42]})[0].clone()
    pool.keep(0, 0)
    executor, right = runtime_in(model).executor, runtime_in(model).executor.execute

    def scarce(*args: Any) -> torch.Tensor:
        if room:
            raise torch.OutOfMemoryError("made up\nhints")
        result: torch.Tensor = right(*args)
        return result

    monkeypatch.setattr(executor, "execute", scarce)
    bind_all(runtime_in(model).bound, executor)
    monkeypatch.setattr(pool, "_make_room", lambda: bool(room and room.pop()))
    try:
        torch.testing.assert_close(pool.prefill({0: [40, 41, 42]})[0], expected)
        room.append(0)
        pool.keep(0, 0)
        with pytest.raises(CapacityError, match=r"no memory left for this step \(made up\)"):
            pool.prefill({0: [40, 41, 42]})
    finally:
        monkeypatch.undo()
        bind_all(runtime_in(model).bound, executor)
