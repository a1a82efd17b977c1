"""Tests of whole models on the emulated device: the CPU's bits, and traces that replay."""

import dataclasses
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tandem
import tests.threaded  # noqa: F401  makes the device known
from tandem.bench.routing_recording import recording
from tandem.core.config import from_mapping
from tandem.core.errors import CapacityError, ConfigError, ExecutionError, TandemError
from tandem.devices.options import OffloadOptions
from tandem.experts.cache.expert_cache import ExpertCache
from tandem.experts.cache.heat import Heat
from tandem.experts.cache.sizing import parse_gpu_memory
from tandem.experts.execution.forced_routing import ForcedRouting
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.experts.tracing.cache_statistics import CacheStatistics
from tandem.generate.generator import Generator
from tandem.hardware.profiles import load_profile, save_profile
from tandem.hf.checkpoint import open_model
from tandem.hf.identity import model_identity
from tandem.hf.load import load_checkpoint
from tandem.policy.settings import FETCHING_RULE, GRAPH_RULE
from tandem.sim.replay import ReplaySettings, Tally, replay
from tandem.trace import RoutingTrace, read_trace, write_trace
from tests.hf.tiny import save_tiny_checkpoint
from tests.inside import SimulatedConfig, runtime_in

PROMPTS = ["hello there", "a", "one two three four five six seven"]


def load(checkpoint: Path, profile: str, **options: Any) -> Any:
    given = {
        "device": "emulated",
        "profile": profile,
        "gpu_memory": "150kB",
        "start_content": "random",
        "cache_dir": str(checkpoint.parent / "cache"),
    }
    config = from_mapping(SimulatedConfig, {**given, **options}, where="tandem.load")
    return load_checkpoint(open_model(checkpoint), config, dtype=torch.float32)


def recorded(model: Any, prompts: Sequence[str] = tuple(PROMPTS)) -> RoutingTrace:
    """Return the routers' choices while the model continues every prompt."""
    with recording(model) as recorder, torch.no_grad():
        for prompt in prompts:
            recorder.begin_sequences()
            ids = torch.tensor([ids_of(prompt)])
            model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=-1)
        return recorder.trace("tiny")


def replayed(trace: RoutingTrace, cache: ExpertCache, resident: list[int]) -> Tally:
    """Run the simulator on the same routing as a cache."""
    run = ReplaySettings(
        settings=cache.settings, profile=cache.machine.profile, shape=cache.machine.shape,
        num_slots=cache.num_slots, prompt=None, compare_every=0,
        in_graph=cache.machine.path.in_graph,
    )  # fmt: skip
    return replay(trace, run, resident=resident)


def ids_of(prompt: str) -> list[int]:
    return [ord(c) % 90 + 20 for c in prompt]


@pytest.mark.every_isa
@pytest.mark.seam
@pytest.mark.parametrize("expert_dtype", ["auto", "int8"])
def test_a_whole_model_says_the_same_to_the_bit(
    checkpoint: Path, profile: str, expert_dtype: str
) -> None:
    alone = tandem.load(checkpoint, dtype="float32", expert_dtype=expert_dtype)
    hybrid = load(checkpoint, profile, expert_dtype=expert_dtype)
    statistics = CacheStatistics()
    runtime_in(hybrid).executor.listeners.append(statistics)
    for prompt in PROMPTS:
        ids = torch.tensor([ids_of(prompt)])
        with torch.no_grad():
            torch.testing.assert_close(hybrid(ids).logits, alone(ids).logits, rtol=0, atol=0)
        tokens = Generator(alone).generate(ids_of(prompt), max_new_tokens=12, temperature=0)
        found = Generator(hybrid).generate(ids_of(prompt), max_new_tokens=12, temperature=0)
        assert found[0].token_ids == tokens[0].token_ids
    assert 0 < statistics.hits < statistics.active


@pytest.mark.parametrize("machine", ["made-up", "desktop-12gb"])
def test_a_recorded_trace_replays_with_the_same_decisions(
    checkpoint: Path, profile: str, machine: str, tmp_path: Path
) -> None:
    model = load(checkpoint, profile if machine == "made-up" else machine)
    executor = runtime_in(model).executor
    assert isinstance(executor, HybridExecutor)
    assert executor.in_graph == (machine != "made-up")  # whose costs for one graph are unknown
    resident = list(executor.cache.resident())
    statistics = CacheStatistics()
    executor.listeners.append(statistics)
    # A prompt of one token is a normal step here, and a prompt for the simulator.
    trace = recorded(model, PROMPTS[::2] if executor.in_graph else PROMPTS)
    assert runtime_in(model).executor is executor
    write_trace(tmp_path / "t.npz", trace)
    trace = read_trace(tmp_path / "t.npz")
    assert trace.token_ids is not None
    assert trace.token_ids[: len(PROMPTS[0])].tolist() == ids_of(PROMPTS[0])
    # This run asked no router ahead, but the recording did, and the simulator would use it.
    trace = dataclasses.replace(trace, predicted=None)
    tally = replayed(trace, executor.cache, resident)
    assert tally.tokens == trace.num_tokens
    assert (tally.demands, tally.hits, tally.copies, tally.total_seconds) == (
        statistics.active,
        statistics.hits,
        statistics.copies,
        executor.cache.clock.now,
    )


def test_a_load_asks_the_trial_and_uses_its_rules(checkpoint: Path) -> None:
    shape = load_profile("desktop-12gb").shape("qwen3-30b-a3b")
    cheap = dataclasses.replace(shape, link_seconds_per_expert=1e-7)
    dear = dataclasses.replace(shape, link_seconds_per_expert=1.0)
    for costs, rule in ((cheap, FETCHING_RULE), (dear, GRAPH_RULE)):
        profile = dataclasses.replace(load_profile("desktop-12gb"), shapes=(costs,))
        host = tuple(
            dataclasses.replace(
                each, fetch_seconds=0.0, second_launch_seconds=1e-9, copy_wake_seconds=0.0
            )
            for each in profile.host
        )
        path = checkpoint.parent / f"{rule}.json"
        save_profile(dataclasses.replace(profile, host=host), path)
        model = load(checkpoint, str(path), gpu_memory="700kB")
        settings = runtime_in(model).executor.cache.settings
        assert settings.graph_rules() == rule
        assert settings.assignment is None


def test_a_trace_forces_its_routing(checkpoint: Path, profile: str) -> None:
    model = load(checkpoint, profile)
    runtime = runtime_in(model)
    ids = torch.tensor([ids_of(PROMPTS[2])])

    def run(ids: torch.Tensor) -> RoutingTrace:
        with recording(model) as recorder, torch.no_grad():
            recorder.begin_sequences()
            model(ids)
            return recorder.trace("tiny")

    trace, flipped = run(ids), run(ids.flip(1))
    assert (flipped.experts != trace.experts).any()
    runtime.use(ForcedRouting(runtime.executor, flipped))
    again = run(ids)
    # The recorder sits outside and sees the model's own choice, the same in the first layer.
    assert (again.experts[:, 0] == trace.experts[:, 0]).all()
    inner: list[Any] = []
    runtime.executor.inner.listeners.append(lambda event: inner.append(event.load.experts))
    run(ids)
    expected = [
        tuple(sorted(set(flipped.experts[:, layer].flatten()))) for layer in range(len(inner))
    ]
    assert inner == expected


def test_a_trace_of_another_shape_is_refused(checkpoint: Path, profile: str) -> None:
    model = load(checkpoint, profile)
    other = read_trace(Path(__file__).parents[2] / "data" / "traces" / "gpt-oss-20b.npz")
    with pytest.raises(ConfigError, match=r"the trace is of a model with 24 MoE layers of 32"):
        ForcedRouting(runtime_in(model).executor, other)


@pytest.mark.parametrize(
    ("memory", "error", "sentence"),
    [
        ("1000", CapacityError, r"gives 1000 B, and one expert takes .*; give at least"),
        ("-1GB", ConfigError, r"gpu_memory is '-1GB'; expected a size such as 8GiB, a fraction"),
        ("lots", ConfigError, r"gpu_memory is 'lots'; expected a size such as 8GiB"),
        ("1.5", ConfigError, r"gpu_memory is '1.5'; expected a size such as 8GiB, a fraction"),
        ("0%", ConfigError, r"gpu_memory is '0%'"),
        ("900TiB", CapacityError, r"gpu_memory is 900 TiB and the device has .*; give at most"),
    ],
)
def test_memory_that_cannot_be_is_refused(
    checkpoint: Path, profile: str, memory: str, error: type[TandemError], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        load(checkpoint, profile, **{"gpu_memory": memory})


def test_experts_that_do_not_fit_are_refused_before_loading(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.experts.store.host_memory.available_bytes", lambda: 600_000)
    with pytest.raises(CapacityError, match=r"experts and dense parts take .* host memory and 586"):
        tandem.load(checkpoint, dtype="float32")
    with pytest.raises(CapacityError, match=r"free; expert_dtype='int4' takes [45].. KiB$"):
        tandem.load(checkpoint, dtype="float32")


def test_heat_is_kept_and_fills_the_next_run(
    checkpoint: Path, profile: str, tmp_path: Path
) -> None:
    options = {"start_content": "heat", "cache_dir": str(tmp_path), "gpu_memory": "300kB"}
    model = load(checkpoint, profile, **options)
    with torch.no_grad():
        model(torch.tensor([ids_of(PROMPTS[2])]))
    executor = runtime_in(model).executor
    heat = next(listener for listener in executor.listeners if isinstance(listener, Heat))
    used = heat.values()
    runtime_in(model).executor = None
    for module in model.modules():
        if hasattr(module, "tandem_experts"):
            del module.tandem_experts
    del executor, heat, model
    gc.collect()
    (kept,) = (tmp_path / "heat").iterdir()
    assert np.load(kept).tolist() == used
    again = runtime_in(load(checkpoint, profile, **options)).executor.cache
    resident = set(again.resident())
    for layer in range(again.geometry.num_layers):
        keys = range(layer * 8, layer * 8 + 8)
        inside = [used[key] for key in keys if key in resident]
        outside = [used[key] for key in keys if key not in resident]
        assert inside
        assert min(inside) >= max(outside)


def test_damaged_heat_counts_as_none(checkpoint: Path, profile: str, tmp_path: Path) -> None:
    options = {"start_content": "heat", "cache_dir": str(tmp_path)}
    name = f"mixtral-{model_identity(load(checkpoint, profile, **options))}.npy"
    (tmp_path / "heat").mkdir()
    (tmp_path / "heat" / name).write_bytes(b"no array")
    assert runtime_in(load(checkpoint, profile, **options)).executor.cache.resident()


@pytest.mark.parametrize("device", ["emulated", "threaded"])
def test_start_contents(checkpoint: Path, profile: str, device: str) -> None:
    def resident(content: str) -> list[int]:
        model = load(checkpoint, profile, start_content=content, device=device)
        keys: list[int] = runtime_in(model).executor.cache.resident()
        runtime_in(model).executor.close()
        return keys

    assert resident("none") == []
    assert resident("random") == resident("random") != []


@pytest.mark.parametrize("device", ["emulated", "threaded"])
def test_memory_for_all_holds_all(checkpoint: Path, profile: str, device: str) -> None:
    """Experts that are fetched for one use have extra slots."""
    model = load(checkpoint, profile, gpu_memory="100MB", device=device)
    executor = runtime_in(model).executor
    assert executor.cache.planner.residency.has_every_expert()
    executor.close()


@pytest.mark.every_isa
def test_the_real_clock_says_the_same_to_the_bit(checkpoint: Path, profile: str) -> None:
    alone = tandem.load(checkpoint, dtype="float32", expert_dtype="int8")
    options = {"device": "threaded", "link_bandwidth": "200MB/s", "expert_dtype": "int8"}
    hybrid = load(checkpoint, profile, **options)
    for prompt in PROMPTS:
        expected = Generator(alone).generate(ids_of(prompt), max_new_tokens=12, temperature=0)
        actual = Generator(hybrid).generate(ids_of(prompt), max_new_tokens=12, temperature=0)
        assert actual[0].token_ids == expected[0].token_ids
    runtime_in(hybrid).executor.close()


def test_steps_of_which_a_token_passes_layers_by_are_planned(profile: str, tmp_path: Path) -> None:
    """In text, tokens skip experts for images; answering layer by layer would wait for them."""
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny", "ernie4_5_vl_moe")
    alone = tandem.load(checkpoint, dtype="float32", expert_dtype="int8")
    hybrid = load(checkpoint, profile, device="threaded", expert_dtype="int8")
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0}
    found, expected = (Generator(model).generate([40, 41], **options) for model in (hybrid, alone))
    assert found[0].token_ids == expected[0].token_ids
    assert runtime_in(hybrid).executor.captured is None
    runtime_in(hybrid).executor.close()


def test_replayed_steps_on_the_real_clock_do_not_ask_python_for_layers(
    checkpoint: Path, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost: listeners get every layer of every token."""
    hybrid = load(checkpoint, profile, device="threaded", expert_dtype="int8", gpu_memory="60kB")
    executor = runtime_in(hybrid).executor
    num_layers = len(executor.store)
    generator = Generator(hybrid)
    generator.generate(ids_of("hello there"), max_new_tokens=6, temperature=0)
    statistics, executed, execute = CacheStatistics(), list[int](), type(executor).execute
    executor.listeners.append(statistics)

    def counting(self: Any, layer: int, *call: Any) -> Any:
        executed.append(layer)
        return execute(self, layer, *call)

    monkeypatch.setattr(type(executor), "execute", counting)
    generator.generate(ids_of("other words"), max_new_tokens=30, temperature=0)
    assert 0 < len(executed) <= 2 * num_layers  # of the prompt
    assert statistics.calls >= 29 * num_layers
    assert 0 < statistics.hits < statistics.active
    executor.close()


def test_a_replayed_step_that_is_lost_is_a_sentence(checkpoint: Path, profile: str) -> None:
    hybrid = load(checkpoint, profile, device="threaded", expert_dtype="int8")
    executor, is_bad = runtime_in(hybrid).executor, False

    def fail(layer: int) -> None:
        if is_bad:
            raise MemoryError("no memory")

    executor.captured.coordinator.set_hook(fail)
    generator = Generator(hybrid)
    expected = generator.generate(ids_of("hello"), max_new_tokens=9, temperature=0)
    is_bad = True
    with pytest.raises(ExecutionError, match="the request is lost"):
        generator.generate(ids_of("hello"), max_new_tokens=9, temperature=0)
    is_bad = False
    again = generator.generate(ids_of("hello"), max_new_tokens=9, temperature=0)
    assert again[0].token_ids == expected[0].token_ids
    executor.close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"device": "gpu"}, "device is 'gpu', which Tandem does not know"),
        ({"link_bandwidth": "fast"}, "link_bandwidth is 'fast'; expected a rate"),
        ({"eviction": "lur"}, "unknown eviction 'lur'; did you mean 'lru'"),
        ({"start_content": "hot"}, "unknown start content 'hot'"),
        ({"emulated_speed": 0}, "emulated_speed is 0; expected a factor in"),
    ],
)
def test_unknown_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        OffloadOptions(**options)


@pytest.mark.parametrize(
    ("text", "num_bytes", "fraction"),
    [("8GiB", 8 << 30, None), ("300MB", 300_000_000, None), (0.5, None, 0.5), ("25%", None, 0.25)],
)
def test_memory_is_parsed(text: Any, num_bytes: int | None, fraction: float | None) -> None:
    share = parse_gpu_memory(text)
    assert (share.num_bytes, share.fraction) == (num_bytes, fraction)
