"""Tests of rarely used parts of device `cuda`: each choice, each fallback."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tandem
from tandem.core.errors import TandemWarning
from tandem.devices.cuda import hand_over_trial
from tandem.devices.cuda import streams as cuda_streams
from tandem.devices.cuda.captures import CudaCapture, on_capture_stream
from tandem.devices.cuda.hand_over_trial import Trial, TrialLimits
from tandem.devices.cuda.streams import CudaStreams, HostCopy, Stream
from tandem.experts.cache.sizing import OutOfDeviceMemoryError
from tandem.machines.cuda import compiled_kernels
from tests.decode.whole_pool import gpu_pool
from tests.hf.tiny import save_tiny_checkpoint
from tests.inside import runtime_in
from tests.shadow.device import shadow_gpu
from tests.shadow.models import (
    PROMPTS,
    assert_same,
    closed_after,
    gpu_options,
    loaded,
    model_outputs,
    outputs_on_cpu,
    quick_loads,
)

CUDA = torch.device("cuda", 0)
MIB = 1 << 20


def _take() -> None:
    torch.zeros(MIB, device=CUDA)


def test_streams_tell_and_limit_what_there_is() -> None:
    with shadow_gpu(total_bytes=64 * MIB, kernels="none") as gpu:
        streams = CudaStreams()
        assert streams.cache_bytes() > 0
        assert streams.memory().total_bytes == 64 * MIB
        assert streams.peak_bytes(_take) >= 4 * MIB
        assert streams.seconds(Stream.COMPUTE, _take) > 0
        for limit in (32 * MIB, 16 * MIB):
            streams.limit(limit)
        with pytest.raises(OutOfDeviceMemoryError, match="out of memory"):
            streams.empty(20 * MIB)
        streams.limit(None)
        streams.limit(None)
        assert gpu.fraction == 1.0
        held = streams.empty(20 * MIB)
        assert streams.taken_bytes() == held.nbytes
        memory = torch.zeros(64, dtype=torch.uint8)
        assert [streams.pin(memory), streams.pin(memory)] == [True, False]  # it is pinned already
        streams.unpin(memory)
        assert gpu.registered_bytes == 0


@pytest.mark.parametrize("code", [0, 1])
def test_a_batch_of_copies_that_the_driver_refuses_goes_one_by_one(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()

    def refuse(batch: Any, stream: int) -> int:
        calls.append(len(batch))
        for entry in batch if code == 0 else ():
            torch.cuda.current_stream()  # as copies by the driver would be
            assert entry.num_bytes == 64
        return code

    monkeypatch.setattr(cuda_streams, "find_batch_copy", lambda: refuse)
    monkeypatch.setattr(cuda_streams, "is_worth_a_batch", lambda batch: True)
    with shadow_gpu(kernels="none"):
        streams = CudaStreams()
        host = torch.arange(256, dtype=torch.uint8).view(4, 64)[1:3]
        assert streams.pin(host)
        assert not host.is_pinned()  # it is; torch looks at the begin of the storage
        sources = [*host]
        targets = [streams.empty(64) for _ in sources]
        copies = [HostCopy(*pair) for pair in zip(targets, sources, strict=True)]
        ready = streams.record(Stream.COMPUTE)
        streams.wait(Stream.AHEAD, ready)
        streams.copy(Stream.AHEAD, copies)
        streams.copy(Stream.AHEAD, copies)
        streams.synchronize()
        if code:
            assert [int(target[0]) for target in targets] == [64, 128]
        streams.unpin(host)
    assert calls == ([2] if code else [2, 2])


def test_a_capture_that_is_abandoned_leaves_nothing() -> None:
    with shadow_gpu(kernels="none") as gpu:
        x, capture = torch.zeros(4, device=CUDA), CudaCapture(CUDA)
        capture.abandon()  # nothing has begun
        with on_capture_stream(capture):
            capture.begin()
            x.add_(1)
            capture.abandon()
        assert gpu.capture is None
        assert x.cpu().tolist() == [0, 0, 0, 0]  # captured work has not run
        with on_capture_stream(capture):
            capture.begin()
            x.add_(1)
            graph = capture.end()
        for _ in range(2):
            graph.replay()
        assert x.cpu().tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("has_words", [False, True])
def test_how_gpu_and_host_signal_each_other_is_found_by_trying(
    has_words: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    with shadow_gpu(has_words=has_words):
        works, tried = Trial.works, list[str]()

        def noted(trial: Trial) -> bool:
            does = works(trial)
            tried.extend([trial.signals.name] if does else [])
            return does

        monkeypatch.setattr(Trial, "works", noted)
        # The last one is the quickest.
        monkeypatch.setattr(hand_over_trial, "_seconds", lambda t: -tried.index(t.signals.name))
        found = hand_over_trial.find_signals(CudaStreams(), TrialLimits(come_seconds=60.0))
        names = ["polling kernels", "stream operations"][: 2 if has_words else 1]
        assert tried == names
        assert found is not None
        assert found.name == names[-1]
        assert (found.wait_seconds > 0) == (not has_words)


def _gives_other_numbers(*args: Any) -> torch.Tensor:
    query: torch.Tensor = args[5]
    return torch.zeros(query.shape[1], query.shape[0], 64, dtype=query.dtype, device=CUDA)


def _cannot_compile() -> None:
    raise ValueError("no compiler\nand more")


def _is_no_kernel(*args: Any) -> None:
    _cannot_compile()


@pytest.mark.parametrize(
    ("broken", "reason"),
    [(_gives_other_numbers, "other numbers than torch"), (_is_no_kernel, r"here \(no compiler\)")],
)
def test_attention_that_does_not_work_is_torchs(
    broken: Callable[..., Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    with shadow_gpu():
        from tandem.decode.cuda import attention
        from tandem.triton_kernels.decode_attention import DecodeAttention

        find = attention.decode_kernels.__wrapped__
        assert isinstance(find(CUDA), DecodeAttention)
        monkeypatch.setattr(DecodeAttention, "__call__", lambda self, *args: broken(None, *args))
        with pytest.warns(TandemWarning, match=reason):
            assert find(CUDA) is None
    with shadow_gpu(capability=(7, 0), kernels="none"):
        assert find(CUDA) is None


def _one_more_than(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: function(*args, **options) + 1


def test_kernels_beside_compressed_keys_are_tried_where_a_model_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    with shadow_gpu():
        from tandem.decode.cuda import attention
        from tandem.triton_kernels import decode_attention, hyper_connections, states

        monkeypatch.setattr(attention, "decode_kernels", attention.decode_kernels.__wrapped__)
        find = attention.compressed_kernels.__wrapped__
        assert isinstance(find(CUDA), decode_attention.DecodeAttention)
        for kind, name, what in (
            (hyper_connections.TritonStreams, "mix_out", "hyper-connections give"),
            (states.TritonStates, "compress", "compressors give"),
            (decode_attention.DecodeAttention, "select_keys", "indexers give"),
            (decode_attention.DecodeAttention, "in_windows", "in windows it gives"),
        ):
            monkeypatch.setattr(kind, name, _one_more_than(getattr(kind, name)))
            with pytest.warns(TandemWarning, match=f"{what} other numbers than torch"):
                assert find(CUDA) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Triton is not installed")
def test_a_machine_is_measured_when_a_model_is_loaded_for_the_first_time(tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny", num_hidden_layers=1)
    options: dict[str, Any] = {
        "device": "cuda", "gpu_memory": "64MB", "threads": 1, "dtype": "float32",
        "cache_dir": str(tmp_path / "cache"),
    }  # fmt: skip
    kept = list[bytes]()
    with shadow_gpu(kernels="none"), quick_loads():
        for _ in range(2):
            with closed_after(tandem.load(checkpoint, **options)):
                (path,) = tmp_path.rglob("gpu-*.json")
                kept.append(path.read_bytes())
    assert kept[0] == kept[1]  # measured once


@pytest.mark.slow
def test_where_all_experts_are_resident_nothing_is_handed_over(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny", "qwen3_moe", num_hidden_layers=2)
    with shadow_gpu() as gpu, quick_loads():
        options = {"dtype": "float32", "expert_dtype": "int8", **gpu_options(tmp_path)}
        model: Any = tandem.load(checkpoint, **options)
        model.generation_config.eos_token_id = None
        gpu.launched.clear()
        generator = tandem.Generator(model, speculate="none")
        generator.generate([[40, 41]], max_new_tokens=10, temperature=0)
        runtime_in(model).executor.close()
        assert {"graph", "add_rows"} <= set(gpu.launched)
        assert "publish" not in gpu.launched


@pytest.mark.slow
def test_slots_change_in_number_after_captured_steps(tmp_path: Path) -> None:
    """Steps must not write state of the earlier slots into the new ones."""
    pytest.importorskip("triton")
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny", "qwen3_moe", num_hidden_layers=2)
    options = {"expert_dtype": "mxfp4", "assignment": "ready-on-gpu"}
    expected = outputs_on_cpu(checkpoint, expert_dtype="mxfp4")
    with shadow_gpu(), quick_loads(), loaded(checkpoint, tmp_path, **options) as model:
        executor = runtime_in(model).executor
        for share in (4, 2):
            executor.resize_now(executor.cache.geometry.num_layers * 8 // share)
            assert_same(model_outputs(model, gpu_pool(model, PROMPTS, 40)), expected)


@pytest.mark.filterwarnings(
    "ignore:decode steps are captured with a break", "ignore:Triton is not installed"
)
def test_routers_that_are_run_ahead_are_on_the_gpu(tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny", "qwen3_moe", num_hidden_layers=2)
    options = {"expert_dtype": "mxfp4", "look_ahead": True}
    expected = outputs_on_cpu(checkpoint, expert_dtype="mxfp4")
    with (
        shadow_gpu(kernels="none"),
        quick_loads(),
        loaded(checkpoint, tmp_path, **options) as model,
    ):
        assert_same(model_outputs(model, gpu_pool(model, PROMPTS, 40)), expected)
        assert runtime_in(model).executor.look_ahead.residuals.means.any()


def test_kernels_that_cannot_be_compiled_are_torchs(tmp_path: Path) -> None:
    class Broken:
        def compilations(self, *args: object) -> list[Callable[[], None]]:
            return [_cannot_compile]

    checkpoint = save_tiny_checkpoint(tmp_path / "tiny", num_hidden_layers=1)
    from tandem.devices.cuda.kernels import TorchKernels
    from tandem.hf.machine.parts import observe
    from tandem.hf.runtime import require_runtime

    model = tandem.load(checkpoint, dtype="float32")
    observed = observe(model, require_runtime(model))
    with shadow_gpu(kernels="none"), pytest.warns(UserWarning, match=r"here \(no compiler\)"):
        kernels = compiled_kernels(Broken(), observed, CudaStreams())  # type: ignore[arg-type]
    assert isinstance(kernels, TorchKernels)
