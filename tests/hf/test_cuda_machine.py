"""Tests of a model on a GPU's code, on the CPU twin: profile, memory shares, equal logits."""

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import tandem
from tandem.core.errors import CapacityError, ConfigError, TandemWarning
from tandem.decode.cuda.dense_cost import with_captured_steps
from tandem.devices.cuda.checks import Gpu
from tandem.devices.cuda.kernels import TorchKernels
from tandem.devices.cuda.streams import Work
from tandem.experts.cache.expert_cache import ExpertCache
from tandem.experts.cache.sizing import budget_bytes, count_slots, parse_gpu_memory
from tandem.experts.execution.executor import CpuExecutor
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.experts.tracing.cache_statistics import CacheStatistics
from tandem.hf.assembly import assemble
from tandem.hf.config import OffloadConfig
from tandem.hf.dense_place import dense_device
from tandem.hf.machine.parts import DeviceParts, ObservedModel, observe
from tandem.hf.runtime import require_runtime
from tandem.kernels.dense import CpuThreads
from tandem.machines import cuda as cuda_machine
from tandem.machines.cuda import (
    compiled_kernels,
    device_parts,
    kv_bytes,
    require_on_one_gpu,
)
from tests.decode.twin_capture import TwinCapture
from tests.experts.lazy_streams import LazyStreams

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return tandem.load(checkpoint, dtype="float32")


@pytest.fixture
def observed(model: Any, tmp_path: Path) -> ObservedModel:
    config = OffloadConfig(device="cuda", gpu_memory="32MB", threads=1, cache_dir=str(tmp_path))
    return dataclasses.replace(observe(model, require_runtime(model)), options=config)


@pytest.fixture
def streams() -> LazyStreams:
    return LazyStreams(is_eager=True)


@pytest.fixture
def made(observed: ObservedModel, streams: LazyStreams) -> DeviceParts:
    return device_parts(observed, streams=streams, device_kernels=TorchKernels())


def test_the_model_says_the_same_on_the_gpus_code(
    model: Any, observed: ObservedModel, made: DeviceParts
) -> None:
    ids = torch.arange(20, 40)[None]
    observed.bind(CpuExecutor(observed.store, CpuThreads(num_threads=1)))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    cache = ExpertCache(
        observed.store,
        made.device,
        made.clock,
        observed.geometry,
        made.machine,
        observed.options.planner_settings(),
        made.make_engine,
    )
    cache.resize(6, [0, 1, 2])
    executor, statistics = HybridExecutor(cache, made.device, made.kernels), CacheStatistics()
    executor.listeners.append(statistics)
    observed.bind(executor)
    with torch.inference_mode():
        for _ in range(3):
            found = model(input_ids=ids).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert statistics.hits > 0
    executor.close()


def test_the_profile_is_measured_once_and_memory_is_shared_out(
    model: Any, made: DeviceParts, streams: LazyStreams, tmp_path: Path
) -> None:
    profile = made.machine.profile
    (shape,) = profile.shapes
    assert profile.gpu == "lazy"
    assert len(shape.gpu_seconds) == len(shape.tokens)
    assert [path.name for path in tmp_path.rglob("gpu-*.json")]
    of_sequence = kv_bytes(model, 4096)
    assert of_sequence > 0
    assert made.reserved_bytes > of_sequence
    slots = count_slots(
        made.share,
        streams.memory(),
        slot_bytes=1 << 20,
        num_experts=100,
        reserved_bytes=made.reserved_bytes,
    )
    assert slots == (32_000_000 - made.reserved_bytes) >> 20
    assert streams.memory().total_bytes == 32_000_000  # no more memory is taken
    assert streams.pinned_bytes == require_runtime(model).store.num_bytes


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"assignment": "dali"}, "assignment dali"),
        ({"eviction": "lru"}, "eviction lru"),
        ({"pool": "shared"}, "pool shared"),
        ({"look_ahead": True}, "look-ahead, as not each router is one product"),
    ],
)
def test_an_option_that_one_graph_cannot_follow_is_followed_in_segments_by_name(
    observed: ObservedModel, options: dict[str, Any], reason: str
) -> None:
    requested = dataclasses.replace(
        observed, options=dataclasses.replace(observed.options, **options)
    )
    streams, no_cache = LazyStreams(is_eager=True), cast("ExpertCache", None)
    with pytest.warns(TandemWarning, match=f"one graph cannot follow {reason}$"):
        parts = device_parts(requested, streams=streams, device_kernels=TorchKernels())
    assert parts.captured(no_cache) is None  # without reading it


@pytest.mark.parametrize("options", [{"prefetch_count": 1}, {"prediction": "regression"}])
def test_requested_prefetches_need_no_segments(
    observed: ObservedModel, options: dict[str, Any], recwarn: pytest.WarningsRecorder
) -> None:
    requested = dataclasses.replace(
        observed, options=dataclasses.replace(observed.options, **options)
    )
    device_parts(requested, streams=LazyStreams(is_eager=True), device_kernels=TorchKernels())
    assert not [each for each in recwarn if issubclass(each.category, TandemWarning)]


class Failing(LazyStreams):
    """A GPU that runs out of memory in a prompt."""

    def peak_bytes(self, work: Work) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_a_load_that_fails_leaves_nothing_pinned_and_no_limit(
    model: Any, profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load fails while the GPU is measured, or after its memory has been divided."""
    runtime = require_runtime(model)
    streams: LazyStreams
    monkeypatch.setattr(cuda_machine, "require_on_one_gpu", lambda model: 0)
    monkeypatch.setattr(cuda_machine, "require_cuda", lambda **options: Gpu("twin", (9, 0), 1))
    monkeypatch.setattr(cuda_machine, "best_kernels", lambda gpu: TorchKernels())
    monkeypatch.setattr(cuda_machine, "CudaStreams", lambda index: streams)
    options: dict[str, Any] = {"device": "cuda", "cache_dir": str(tmp_path), "profile": profile}
    for streams, gpu_memory, error in (
        (Failing(is_eager=True), "32MB", torch.OutOfMemoryError),
        (LazyStreams(is_eager=True), "1MB", CapacityError),
        (LazyStreams(is_eager=True), "1TB", CapacityError),
    ):
        config = OffloadConfig(gpu_memory=gpu_memory, **options)
        with pytest.raises(error):
            assemble(model, runtime, config)
        assert streams.num_pinned > 0
        assert streams.pinned_bytes == 0
        assert streams.memory().total_bytes == 1 << 30


def test_a_model_answers_after_its_executor_could_not_be_replaced(
    model: Any, profile: str, tmp_path: Path
) -> None:
    runtime, ids = require_runtime(model), torch.tensor([[3, 1, 4]])
    before = model(ids).logits
    good = OffloadConfig(device="emulated", cache_dir=str(tmp_path), profile=profile)
    assemble(model, runtime, good)
    with pytest.raises(CapacityError):
        assemble(model, runtime, dataclasses.replace(good, gpu_memory="1KB"))
    assert torch.equal(model(ids).logits, before)


def test_the_workspace_is_measured_with_the_logits_of_one_token(
    model: Any, observed: ObservedModel
) -> None:
    """2,048 rows of logits for a prompt would reduce the expert cache for nothing."""
    seen = list[int]()

    class Watching(LazyStreams):
        def peak_bytes(self, work: Work) -> int:
            head = model.get_output_embeddings()
            hook = head.register_forward_hook(lambda _, given, out: seen.append(out.shape[-2]))
            with contextlib.closing(SimpleNamespace(close=hook.remove)):
                return super().peak_bytes(work)

    device_parts(observed, streams=Watching(is_eager=True), device_kernels=TorchKernels())
    assert seen == [1]


class Uncompilable(TorchKernels):
    """Kernels whose compilations fail with `error`, or are recorded."""

    def __init__(self, compiled: list[int], error: str | None) -> None:
        self._compiled, self._error = compiled, error

    def compilations(self, layers: Any, dtype: Any, top_k: int, device: Any) -> Any:
        def compile_one() -> None:
            if self._error:
                raise RuntimeError(self._error)
            self._compiled.append(len(layers))

        return [compile_one] * 3


def test_kernels_are_compiled_at_load_or_torch_computes_which_is_told(
    observed: ObservedModel, streams: LazyStreams
) -> None:
    compiled = list[int]()
    good = Uncompilable(compiled, None)
    assert compiled_kernels(good, observed, streams) is good
    assert compiled == [len(observed.store)] * 3
    with pytest.warns(UserWarning, match=r"cannot compile.*\(no cc\).*with torch, many times slow"):
        found = compiled_kernels(Uncompilable([], "no cc"), observed, streams)
    assert type(found) is TorchKernels


def test_dense_parts_are_timed_in_captured_steps(
    model: Any, observed: ObservedModel, made: DeviceParts
) -> None:
    store, bound = observed.store, observed.bound
    (before,) = made.machine.profile.shapes
    slow = dataclasses.replace(before, dense_seconds=(9.0,) * len(before.tokens))
    profile = dataclasses.replace(made.machine.profile, shapes=(slow,))
    found = with_captured_steps(profile, model, store, bound, made.device, TwinCapture)
    (shape,) = found.shapes
    for tokens, seconds in zip(shape.tokens, shape.dense_seconds, strict=True):
        assert 0 < seconds < 9.0 if tokens <= 8 else seconds == 9.0
    host = found.host_costs()
    assert host is not None
    assert host.path == "segments"  # breaks at the experts
    assert host.layer_seconds >= 0
    # A step that cannot be captured leaves the profile as it is.
    observed.bind(CpuExecutor(store, CpuThreads(num_threads=1)))

    class Refusing(TwinCapture):
        def begin(self) -> None:
            raise RuntimeError("made up")

    with pytest.warns(UserWarning, match="made up"):
        assert with_captured_steps(profile, model, store, bound, made.device, Refusing) is profile


def test_a_profile_is_not_for_another_number_of_threads(
    observed: ObservedModel, made: DeviceParts, tmp_path: Path
) -> None:
    other = dataclasses.replace(observed.options, threads=2)
    device_parts(
        dataclasses.replace(observed, options=other),
        streams=LazyStreams(is_eager=True),
        device_kernels=TorchKernels(),
    )
    assert len(list(tmp_path.rglob("gpu-*.json"))) == 2


def test_dense_parts_on_several_gpus_are_refused() -> None:
    def dense(*devices: str) -> Any:
        parameters = [SimpleNamespace(device=torch.device(device)) for device in devices]
        return SimpleNamespace(device=parameters[0].device, parameters=lambda: parameters)

    require_on_one_gpu(dense("cuda:1", "cpu", "cuda:1"))
    with pytest.raises(ConfigError, match="on cuda:0, cuda:1, and Tandem uses one GPU"):
        require_on_one_gpu(dense("cuda:0", "cpu", "cuda:1"))
    with pytest.raises(ConfigError, match="dense parts are on cpu"):
        require_on_one_gpu(dense("cpu"))


def test_more_memory_than_the_gpu_has_is_refused() -> None:
    share = parse_gpu_memory("1TB")
    with pytest.raises(CapacityError, match="the device has 1 GiB"):
        budget_bytes(share, LazyStreams().memory())


def test_dense_parts_go_where_the_user_says_or_to_the_gpu() -> None:
    assert dense_device(OffloadConfig(), None) == CPU
    assert dense_device(OffloadConfig(device="cuda"), "cpu") == CPU
    if not torch.cuda.is_available():
        on_gpu = OffloadConfig(device="cuda")
        for config, place in (
            (on_gpu, None),
            (OffloadConfig(), "cuda"),
            (OffloadConfig(), {"": 0}),
        ):
            with pytest.raises(CapacityError, match="device cpu"):
                dense_device(config, place)


def test_an_unknown_device_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="cuda"):
        OffloadConfig(device="cudo")
