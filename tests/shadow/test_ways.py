"""Tests of the ways to load a model for a GPU, and to use it there."""

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import tandem
from tandem.decode.cuda import attention
from tandem.decode.cuda.slots import new_cuda_slot_pool
from tandem.engine.engine import Engine
from tandem.engine.messages import EngineSettings, Failed, Progressed, Stop, Submit
from tandem.experts.tracing.cache_statistics import CacheStatistics
from tandem.experts.tracing.events import LayerExecuted
from tandem.generate.generator import Generator
from tandem.generate.request import Request
from tandem.generate.sampling import SamplingOptions
from tandem.generate.token_output import TokenOutput
from tandem.hf import assembly
from tandem.hf.dense_place import move_dense_parts
from tandem.policy.plan import Copy
from tests.decode.test_mtp import WithMtp
from tests.decode.test_mtp_streams import write as write_with_streams
from tests.decode.whole_pool import gpu_pool
from tests.disk.loading import memory_for, slots_of
from tests.generate.test_speculation import Scripted, speculating
from tests.gpu.models import compare_logits
from tests.hf.tiny import byte_tokenizer, save_tiny_checkpoint
from tests.images import image_prompt, save_image_checkpoint
from tests.inside import runtime_in
from tests.loading.checkpoints import FORMATS, write_plain, write_quantised
from tests.loading.gguf_files import tiny_model, write_gguf
from tests.shadow.device import shadow_gpu
from tests.shadow.models import (
    MOST_DIVERGENCE,
    TEXT,
    TOKENS,
    assert_same,
    closed_after,
    gpu_options,
    in_dry_gpu,
    loaded,
    model_outputs,
    outputs_on_cpu,
    quick_loads,
)

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:Triton is not installed")  # a run without kernels

PROMPTS = [[40, 41, 42], [60] * 9]
LONG = [40 + i * 7 % 60 for i in range(150)]
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0}


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([TEXT]).to(model.device)).logits.cpu()
    return logits


def packed(directory: Path) -> Path:
    plain = save_tiny_checkpoint(directory / "plain", "qwen3_moe")
    model = tandem.load(plain, dtype="float32", expert_dtype="int4", dense_dtype="int8-g32")
    tandem.save(model, directory / "packed")
    return directory / "packed"


def quantised(directory: Path) -> Path:
    fmt = FORMATS["gptq"]
    return write_quantised(directory / "gptq", write_plain(directory / "p", fmt.architecture), fmt)


def gguf(directory: Path) -> Path:
    return write_gguf(directory / "model.gguf", tiny_model(), "Q4_0")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(packed, marks=in_dry_gpu),
        pytest.param(quantised, marks=in_dry_gpu),
        gguf,
    ],
)
def test_a_checkpoint_of_any_kind_is_loaded(make: Callable[[Path], Path], tmp_path: Path) -> None:
    checkpoint = make(tmp_path)
    options: dict[str, Any] = {"dtype": "float32", "dense_dtype": "auto"}
    expected = logits_of(tandem.load(checkpoint, threads=1, **options))
    with shadow_gpu() as gpu, quick_loads():
        model = tandem.load(checkpoint, **gpu_options(tmp_path), **options)
        with closed_after(model):
            divergence, is_same = compare_logits(logits_of(model), expected, gap=1.0)
            assert divergence <= MOST_DIVERGENCE
            assert is_same
            assert {"few_rows", "many_rows"} & set(gpu.launched)


@in_dry_gpu
def test_experts_on_a_disk_come_to_the_gpu_out_of_pinned_slots(tmp_path: Path) -> None:
    checkpoint = packed(tmp_path)
    expected, memory = outputs_on_cpu(checkpoint), memory_for(checkpoint, 0.4, has_device=True)
    with shadow_gpu() as gpu, quick_loads():
        with loaded(checkpoint, tmp_path, expert_memory=memory) as model:
            slots = slots_of(model)
            assert_same(model_outputs(model, gpu_pool(model, PROMPTS, 40)), expected)
            assert gpu.registered_bytes == slots.num_bytes
            assert slots.statistics().read_bytes > 0
            assert {"graph", "publish", "combine"} <= set(gpu.launched)
        assert gpu.registered_bytes == 0


def rows_of(slots: Any) -> Tensor:
    """Return the logits after a prompt and after each of some tokens."""
    rows = [slots.prefill({0: PROMPTS[0]}).cpu().clone()]
    rows += [slots.decode({0: token}).cpu().clone() for token in TOKENS]
    return torch.cat(rows)


@pytest.mark.parametrize("decode_graph", [pytest.param(False, marks=in_dry_gpu), True])
def test_experts_that_tokens_choose_are_copied_to_the_gpu_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, decode_graph: bool
) -> None:
    """Prompts and planned steps copy exactly these experts; all layers are routed by token.

    Attention's kernels are not tested here, because they are slow when interpreted.
    """
    monkeypatch.setattr(attention, "compressed_kernels", lambda device: None)
    values: dict[str, Any] = {
        "n_routed_experts": 128, "num_hidden_layers": 2, "mlp_layer_types": ["hash_moe"] * 2,
        "layer_types": ["sliding_attention"] * 2, "hc_sinkhorn_iters": 1,
    }  # fmt: skip
    checkpoint = save_tiny_checkpoint(tmp_path / "hashed", "deepseek_v4", **values)
    kinds: dict[str, Any] = {"dtype": "float32", "expert_dtype": "mxfp4"}
    alone, statistics = tandem.load(checkpoint, threads=1, **kinds), CacheStatistics()
    expected, events = rows_of(Generator(alone).slot_pool(1)), list[LayerExecuted]()
    options: dict[str, Any] = {"assignment": "ready-on-gpu" if decode_graph else "balanced"}
    with (
        shadow_gpu(), quick_loads(),
        loaded(checkpoint, tmp_path, decode_graph=decode_graph, **options, **kinds) as model,
    ):  # fmt: skip
        runtime_in(model).executor.listeners += [statistics, events.append]
        slots: Any = Generator(model).slot_pool(1)
        divergence, is_same = compare_logits(rows_of(slots), expected, gap=1.0)
        assert slots.step.is_replaying, slots.step.why_not
    assert divergence <= MOST_DIVERGENCE
    assert is_same
    assert statistics.prefetch_useful > 0
    steps = [*zip(*[iter(events)] * 2, strict=True)]
    ahead = [[c for e in step for c in (*e.step_copies, *copies_of(e))] for step in steps]
    assert ahead[0]  # of the prompt
    for step, copies in zip(steps, ahead, strict=True):
        assert all(copy.expert in experts_of(step[copy.layer]) for copy in copies)


def copies_of(event: LayerExecuted) -> Sequence[Copy]:
    return () if event.plan is None else event.plan.prefetch


def experts_of(event: LayerExecuted) -> Sequence[int]:
    return () if event.load is None else event.load.experts


@pytest.mark.parametrize("device_map", [{"": 0}, "cuda", None])
def test_transformers_loads_it_by_a_users_own_device_map(
    device_map: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No experts' tensor is copied to the GPU, and nothing before the dense parts."""
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny", "granitemoe")  # experts that are fused
    expected = logits_of(tandem.load(checkpoint, dtype="float32"))
    taken = list[int]()

    def move(*given: Any) -> None:
        taken.append(gpu.peak_bytes)
        move_dense_parts(*given)

    monkeypatch.setattr(assembly, "move_dense_parts", move)
    with shadow_gpu(kernels="none") as gpu, quick_loads():
        model: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype="float32", device_map=device_map,
            quantization_config=tandem.OffloadConfig(**gpu_options(tmp_path)),
        )  # fmt: skip
        with closed_after(model):
            assert model.device == torch.device("cuda", 0)
            torch.testing.assert_close(logits_of(model), expected, rtol=1e-3, atol=1e-3)
    assert taken == [0]


def test_it_is_loaded_without_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("utils.import_utils", "integrations.accelerate", "modeling_utils"):
        monkeypatch.setattr(f"transformers.{place}.is_accelerate_available", bool)
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny")
    with shadow_gpu(kernels="none"), quick_loads(), loaded(checkpoint, tmp_path) as model:
        assert logits_of(model).isfinite().all()


def ids_of(answers: Any) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def endless(model: Any) -> Any:
    """Disable the end token, so that a model generates all requested tokens."""
    model.generation_config.eos_token_id = None
    return model


@in_dry_gpu
def test_a_long_prompt_fetches_experts_and_drafts_share_a_graph(tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny", "qwen3_moe", num_hidden_layers=2)
    kinds: dict[str, Any] = {"dtype": "float32", "expert_dtype": "int8"}
    alone = tandem.load(checkpoint, threads=1, **kinds)
    expected = Generator(alone).slot_pool(1, capacity=len(LONG)).prefill({0: LONG})
    events: list[LayerExecuted] = []
    with shadow_gpu() as gpu, quick_loads(), loaded(checkpoint, tmp_path, **kinds) as model:
        runtime_in(model).executor.listeners.append(events.append)
        found = Generator(model).slot_pool(1, capacity=len(LONG)).prefill({0: LONG})
        assert compare_logits(found, expected, gap=1.0)[0] <= MOST_DIVERGENCE
        assert any(event.plan.fetch for event in events if event.plan is not None)
        (plain,) = Generator(endless(model), speculate="none").generate(PROMPTS[:1], **GREEDY)
        whole = {0: [*PROMPTS[0], *plain.token_ids]}
        (answer,) = speculating(model, Scripted(whole)).generate(PROMPTS[:1], **GREEDY)
        assert answer.accepted_tokens > 0
        assert {"graph", "publish", "combine"} <= set(gpu.launched)


def with_one_state(directory: Path) -> Path:
    return WithMtp(directory / "mtp", "deepseek_v3", is_right=True).directory


def with_streams(directory: Path) -> Path:
    return write_with_streams(directory)[0]  # as released, in FP8 and e2m1


@pytest.mark.parametrize("make", [with_one_state, pytest.param(with_streams, marks=in_dry_gpu)])
def test_an_mtp_layer_drafts_from_what_a_step_tells(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    checkpoint = make(tmp_path)
    alone = tandem.load(checkpoint, dtype="float32", threads=1)
    expected = Generator(endless(alone), speculate="none").generate(PROMPTS[:1], **GREEDY)
    with shadow_gpu(kernels="none"), quick_loads(), loaded(checkpoint, tmp_path) as model:
        generator = Generator(endless(model), speculate="mtp")
        answers = generator.generate(PROMPTS[:1], **GREEDY)
        assert generator.why_padded is None
        assert not generator.why_slower, generator.why_slower
    assert ids_of(answers) == ids_of(expected)
    assert answers[0].drafted_tokens > 0


@pytest.mark.slow
def test_images_are_read_on_the_gpu(tmp_path: Path) -> None:
    checkpoint = save_image_checkpoint(tmp_path / "tiny", "qwen3_vl_moe")
    alone: Any = tandem.load(checkpoint, dtype="float32", threads=1)
    prompt = image_prompt(alone, [40, (2, 2), 41])
    expected = Generator(endless(alone)).generate(prompt, **GREEDY)
    with shadow_gpu(kernels="none"), quick_loads(), loaded(checkpoint, tmp_path) as model:
        assert ids_of(Generator(endless(model)).generate(prompt, **GREEDY)) == ids_of(expected)


@pytest.mark.slow
def test_states_and_prompts_are_taken_up_again(tmp_path: Path) -> None:
    """They continue from a slot's checkpoints on the host."""
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny", "lfm2_moe")
    alone = tandem.load(checkpoint, dtype="float32", threads=1)
    options = {**GREEDY, "max_new_tokens": 4}
    turns = [LONG, [*LONG, 90, 91, 92], [*LONG[:146], 90]]
    expected = [ids_of(Generator(endless(alone)).generate([turn], **options)) for turn in turns]
    with shadow_gpu(kernels="none"), quick_loads(), loaded(checkpoint, tmp_path) as model:
        generator = Generator(endless(model))
        answers = [generator.generate([turn], **options) for turn in turns]
    assert [ids_of(each) for each in answers] == expected
    assert answers[1][0].reused_tokens > 0
    assert answers[2][0].reused_tokens > 0


@pytest.mark.slow
def test_delays_of_a_projection_lie_on_the_gpu(tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny", "zaya")
    expected = Generator(tandem.load(checkpoint, dtype="float32")).slot_pool(1).prefill({0: TEXT})
    with shadow_gpu(kernels="none"), quick_loads(), loaded(checkpoint, tmp_path) as model:
        found = new_cuda_slot_pool(model, 1).prefill({0: TEXT}).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_servers_engine_answers_requests_that_come_and_go(tmp_path: Path) -> None:
    """Two requests share steps; the third has the first one's prefix, which a slot still has."""
    ours, theirs = multiprocessing.Pipe()
    prompts = LONG[:40], [50, 51, 52], [*LONG[:40], 50]
    options = SamplingOptions(max_new_tokens=8, temperature=0.0)
    for number, prompt in enumerate(prompts):
        request = Request(request_id=number, prompt=tuple(prompt), options=options)
        ours.send(Submit(request))
    outputs: dict[int, TokenOutput] = {}

    def take() -> None:
        while not (len(outputs) == 3 and all(each.finish_reason for each in outputs.values())):
            message = ours.recv()
            assert not isinstance(message, Failed), message
            for output in message.token_outputs if isinstance(message, Progressed) else ():
                outputs[output.request_id] = output
        ours.send(Stop())

    checkpoint = save_tiny_checkpoint(tmp_path / "tiny")
    with shadow_gpu(kernels="none") as gpu, quick_loads(), loaded(checkpoint, tmp_path) as model:
        settings = EngineSettings(max_running=2, part_tokens=16)
        engine = Engine(lambda: (model, byte_tokenizer()), settings, theirs)
        client = threading.Thread(target=take)
        client.start()
        engine.run()
        client.join()
    assert [outputs[number].reused_tokens for number in range(3)] == [0, 0, 40]
    assert "graph" in gpu.launched
