"""Tests of dense models on a simulated GPU: entirely there, or refused before reading."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tandem
from tandem.cli.main import main
from tandem.core.errors import CapacityError, ConfigError
from tandem.devices.cuda.linear import DeviceLinear
from tandem.generate.generator import Generator
from tandem.hf import dense_bytes, whole_model
from tests.architectures import build_tiny_dense_model
from tests.decode.whole_pool import gpu_pool
from tests.hf.tiny import save_tiny_dense
from tests.inside import relative_error, runtime_in
from tests.loading.test_gguf_models import unpacked
from tests.shadow.device import shadow_gpu
from tests.shadow.models import (
    PROMPTS,
    assert_same,
    in_dry_gpu,
    model_outputs,
    outputs_on_cpu,
    quick_loads,
    require_steps_without_waits,
)

pytest.importorskip("triton")

MESSAGE = (
    r"takes .* of the GPU's memory \(weights .*, keys and values .*\), and there are .* for it"
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_tiny_dense(tmp_path / "qwen3")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A model that is small enough for an interpreter."""
    values = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    model = build_tiny_dense_model("qwen3", class_name="Qwen3ForCausalLM", values=values)
    model.save_pretrained(tmp_path / "small")
    return tmp_path / "small"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))


def test_it_says_the_same_on_a_gpu_in_whole_graphs(small: Path) -> None:
    expected = outputs_on_cpu(small, dense_dtype="int8")
    with shadow_gpu() as gpu, quick_loads():
        model: Any = tandem.load(
            small, dtype="float32", dense_dtype="int8", device="cuda", gpu_memory="2GB", threads=1
        )
        assert {str(p.device) for p in model.parameters()} == {"cuda:0"}
        assert gpu.fraction == pytest.approx(2e9 / (8 << 30))
        pool = gpu_pool(model, PROMPTS, 40)
        assert_same(model_outputs(model, pool), expected)
        require_steps_without_waits(gpu, pool)
        assert {"few_rows", "attend_parts", "graph"} <= set(gpu.launched)
        assert not {"publish", "combine"} & set(gpu.launched)
        runtime_in(model).executor.close()
        assert gpu.fraction == 1.0


def plain(directory: Path) -> Path:
    return save_tiny_dense(directory / "plain")


def tied(directory: Path) -> Path:
    values = {"tie_word_embeddings": True}
    model = build_tiny_dense_model("qwen3", class_name="Qwen3ForCausalLM", values=values)
    model.save_pretrained(directory / "tied")
    return directory / "tied"


def packed(directory: Path) -> Path:
    model = tandem.load(plain(directory), dense_dtype="int4", threads=1)
    return tandem.save(model, directory / "packed")


def with_states(directory: Path) -> Path:
    return unpacked("qwen35", directory)


@pytest.mark.parametrize("make", [plain, tied, packed, with_states])
def test_what_it_takes_is_known_before_it_is_read(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, expected = make(tmp_path), list[int]()
    known = dense_bytes.device_bytes

    def note(*given: Any) -> int:
        expected.append(known(*given))
        return expected[-1]

    monkeypatch.setattr(whole_model, "device_bytes", note)
    with shadow_gpu(), quick_loads():
        model: Any = tandem.load(checkpoint, dense_dtype="auto", device="cuda", threads=1)
        tensors = [t for t in (*model.parameters(), *model.buffers()) if t.device.type != "cpu"]
        layers = [m.packed.image for m in model.modules() if isinstance(m, DeviceLinear)]
        assert bool(layers) == (make in (packed, with_states))
        assert sum(tensor.nbytes for tensor in (*tensors, *layers)) == expected[0]
        runtime_in(model).executor.close()


@in_dry_gpu
def test_states_are_kept_there(tmp_path: Path) -> None:
    checkpoint = with_states(tmp_path)
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0}
    alone: Any = tandem.load(checkpoint, dtype="float32", threads=1)
    alone.generation_config.eos_token_id = None
    (expected,) = Generator(alone).generate([40, 41, 42], **options)
    with shadow_gpu(kernels="none"), quick_loads():
        model: Any = tandem.load(checkpoint, dtype="float32", device="cuda", threads=1)
        model.generation_config.eos_token_id = None
        generator = Generator(model)
        (answer,) = generator.generate([40, 41, 42], **options)
        assert (answer.token_ids, generator.why_slower) == (expected.token_ids, None)
        runtime_in(model).executor.close()


def test_transformers_loads_it_by_a_users_own_device_map(checkpoint: Path) -> None:
    alone: Any = tandem.load(checkpoint, dtype="float32", threads=1)
    expected = alone(torch.tensor(PROMPTS[:1])).logits
    with shadow_gpu(kernels="none"), quick_loads():
        model: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype="float32", device_map="cuda",
            quantization_config=tandem.OffloadConfig(gpu_memory="0.5", threads=1),
        )  # fmt: skip
        assert model.device == torch.device("cuda", 0)
        found = model(torch.tensor(PROMPTS[:1]).to(model.device)).logits.cpu()
        assert relative_error(found, expected) < 1e-5
        runtime_in(model).executor.close()


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that nothing is copied to the GPU."""

    def fail(*_: object) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr("tandem.hf.assembly.move_dense_parts", fail)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("options", "total", "sentence"),
    [
        ({"gpu_memory": "1.1MB"}, 1 << 30, MESSAGE + ".*: dense_dtype='int8' takes .*device cpu$"),
        (
            {},
            700_000,
            MESSAGE + r".*\(gpu_memory; 684 KiB are free\).*: give it more memory, or run",
        ),
        ({"gpu_memory": "2GB"}, 1 << 30, "gpu_memory is .* and the device has 1 GiB"),
    ],
)
def test_one_that_a_gpu_does_not_hold_is_refused(
    checkpoint: Path, options: dict[str, Any], total: int, sentence: str
) -> None:
    with shadow_gpu(total_bytes=total), pytest.raises(CapacityError, match=sentence):
        tandem.load(checkpoint, dtype="float32", device="cuda", threads=1, **options)


def test_what_is_of_experts_is_refused_there_too(checkpoint: Path) -> None:
    with shadow_gpu(), pytest.raises(ConfigError, match="decode_graph, eviction: only for exp"):
        tandem.load(checkpoint, device="cuda", eviction="lru", decode_graph=False)


def test_weights_beside_the_gpu_are_refused(checkpoint: Path) -> None:
    with shadow_gpu(kernels="none"), pytest.raises(ConfigError, match="dense parts are on cpu"):
        tandem.load(checkpoint, device="cuda", device_map="cpu", threads=1)


def test_commands_say_alike_whether_it_fits(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["run", str(checkpoint), "-p", "hi", "--max-new-tokens", "3", "--temperature", "0"]
    plan = ["plan", str(checkpoint)]
    with shadow_gpu(kernels="none"), quick_loads():
        errors = []
        for command in (run, plan):
            assert main([*command, "--device", "cuda", "--gpu-memory", "300KB"]) == 2
            errors.append(capsys.readouterr().err)
        assert errors[0] == errors[1]
        assert "the model takes 1.16 MiB of the GPU's memory" in errors[0]
        assert main([*plan, "--device", "cuda"]) == 0
        planned = capsys.readouterr().out
        assert "cuda: all of the model, weights 483 KiB, KV cache" in planned
        assert "speed: not forecast: profiles have no times of a dense model" in planned
        assert main([*run, "--device", "cuda"]) == 0
        assert "the GPU computes all" in capsys.readouterr().err
        gc.collect()  # the model, while its GPU is there


def test_it_is_planned_for_another_machines_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--shape", "qwen3-8b", "--device", "cuda", "--profile", "desktop-12gb"]
    assert main(plan) == 2
    assert "14.8 GiB of the GPU's memory" in (errors := capsys.readouterr().err)
    assert "--dense-dtype int8 takes 7.82 GiB" in errors
    assert main([*plan, "--dense-dtype", "int8"]) == 0
    assert "cuda: all of the model, weights 7.1" in capsys.readouterr().out
