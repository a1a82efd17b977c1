"""Tests that experts on the disk give the bits of experts in memory."""

import ctypes
import os
import platform
import shutil
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tandem
from tandem.checkpoint.mapped_files import mapped_tensors
from tandem.core.errors import CapacityError, ConfigError
from tandem.experts.cache.memory_watch import MemoryWatch
from tandem.experts.execution.executor import CpuExecutor
from tandem.experts.store.host_store import HostStore
from tandem.kernels.dense import CpuThreads
from tandem.kernels.formats.weight_format import find_format
from tandem.policy.plan import Geometry
from tests.disk.loading import (
    EXPERTS,
    LAYERS,
    TOP_K,
    ids,
    memory_for,
    packed_model,
    put_on_disk,
    slots_of,
    with_share,
)
from tests.experts.machines import FUNCTIONS, make_store, route
from tests.inside import runtime_in

PROMPTS = {"one token": 1, "a step": 7, "a prompt": 60}


@pytest.mark.parametrize("count", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("eviction", ["next-use", "lru"])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_forward_pass_has_the_bits_of_memory(
    packed: Path, in_memory: Any, share: float, eviction: str, count: int
) -> None:
    model = with_share(packed, share, eviction=eviction)
    with torch.inference_mode():
        for seed in range(3):
            found, expected = (m(ids(count, seed)).logits for m in (model, in_memory))
            assert torch.equal(found, expected)
    statistics = slots_of(model).statistics()
    assert slots_of(model).num_slots == [int(EXPERTS * share)] * LAYERS
    assert statistics.misses > 0 or share == 1.0  # otherwise filled before
    assert statistics.read_bytes > 0


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_recorded_steps_of_several_sequences_have_the_tokens_of_memory(
    packed: Path, in_memory: Any, share: float
) -> None:
    model = with_share(packed, share)
    prompts = [ids(count, count)[0].tolist() for count in (3, 20, 45)]
    found, expected = (
        tandem.Generator(m).generate(prompts, max_new_tokens=20) for m in (model, in_memory)
    )
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_what_stays_in_memory_is_found_there(packed: Path) -> None:
    model = with_share(packed, 1.0)
    with torch.inference_mode():
        for _ in range(2):
            model(ids(200))
        before = slots_of(model).statistics()
        model(ids(200))
        after = slots_of(model).statistics()
    assert (after.misses, after.read_bytes) == (before.misses, before.read_bytes)
    assert after.hits > before.hits


@pytest.mark.parametrize("piece_bytes", [4096, 512 << 10])
def test_slots_are_filled_while_nothing_else_reads_the_disk(
    packed: Path, in_memory: Any, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.experts.cache.host_slots._PIECE_BYTES", piece_bytes)
    model = with_share(packed, 0.5)
    native = slots_of(model).native
    deadline = time.monotonic() + 60
    while any(len(native.resident(layer)) < EXPERTS // 2 for layer in range(LAYERS)):
        assert time.monotonic() < deadline
    assert native.counts().misses == 0
    with torch.inference_mode():
        assert torch.equal(model(ids(9)).logits, in_memory(ids(9)).logits)
    assert native.counts().hits > 0


def test_what_was_read_ahead_in_vain_gives_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One-token prompts, repeated, use few of the experts that fill all transit slots."""
    monkeypatch.setattr("tandem.experts.cache.host_slots._PATIENCE_SECONDS", 5.0)
    many = packed_model(tmp_path, num_experts=128, num_experts_per_tok=2, num_hidden_layers=6)
    model, whole = with_share(many, 0.0), tandem.load(many)
    with torch.inference_mode():
        for token in range(5, 9):
            prompt = torch.full((1, 60), token)
            assert torch.equal(model(prompt).logits, whole(prompt).logits)


def test_a_prompt_reads_the_next_layer_ahead(packed: Path) -> None:
    model = with_share(packed, 0.5)
    with torch.inference_mode():
        model(ids(100))
    slots = slots_of(model)
    assert slots.native.counts().ahead > 0
    assert all(len(slots.native.resident(layer)) == EXPERTS // 2 for layer in range(LAYERS))


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_a_prompt_of_more_experts_than_transit_slots_has_the_bits_of_memory(
    tmp_path: Path, share: float
) -> None:
    """Experts are handed out in groups while others still wait for a slot."""
    many = packed_model(tmp_path, num_experts=96, num_experts_per_tok=6, num_hidden_layers=3)
    model, whole = with_share(many, share), tandem.load(many)
    slots_of(model).native.fail(0, 5, 0.002)
    with torch.inference_mode():
        for seed, count in enumerate((300, 33, 60)):
            assert torch.equal(model(ids(count, seed)).logits, whole(ids(count, seed)).logits)


def test_slow_reads_change_no_bit(packed: Path, in_memory: Any) -> None:
    model = with_share(packed, 0.3)
    slots_of(model).native.fail(0, 3, 0.01)
    with torch.inference_mode():
        assert torch.equal(model(ids(20)).logits, in_memory(ids(20)).logits)


def test_too_little_memory_says_the_least(packed: Path) -> None:
    with pytest.raises(CapacityError, match="and need at least"):
        tandem.load(packed, expert_memory="20KB")


@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize("eviction", ["next-use", "lru"])
def test_a_device_over_memory_over_a_disk_has_the_bits_of_memory(
    packed: Path, profile: str, share: float, eviction: str
) -> None:
    options: dict[str, Any] = {"device": "emulated", "gpu_memory": "300KB", "profile": profile}
    model = with_share(packed, share, eviction=eviction, **options)
    with_memory = tandem.load(packed, eviction=eviction, **options)
    with torch.inference_mode():
        for seed, count in enumerate((1, 7, 60, 1, 1, 7)):
            found, expected = (m(ids(count, seed)).logits for m in (model, with_memory))
            assert torch.equal(found, expected)
    assert slots_of(model).statistics().read_bytes > 0
    assert runtime_in(with_memory).host_slots is None


def test_a_cpu_alone_gives_the_slots_of_copies_to_resident_experts(
    packed: Path, profile: str
) -> None:
    """Planned memory that no run touches would be memory that experts lack."""
    memory = memory_for(packed, 0.5)
    alone = slots_of(tandem.load(packed, expert_memory=memory))
    device: dict[str, Any] = {"device": "emulated", "gpu_memory": "300KB", "profile": profile}
    beside = slots_of(tandem.load(packed, expert_memory=memory, **device))
    assert beside.transit_bytes - alone.transit_bytes == 3 * alone.slot_bytes
    assert alone.resident_bytes > beside.resident_bytes
    assert max(alone.num_bytes, beside.num_bytes) <= int(memory)


def test_what_a_device_takes_is_counted_apart(tmp_path: Path) -> None:
    store = make_store()
    slots = put_on_disk(store, tmp_path / "experts", 0.5)
    for expert in (0, 0, 1):
        with store[0].hold(expert):
            pass
    found = slots.statistics()
    assert (found.device_hits, found.device_misses) == (1, 2)
    assert (found.hits, found.misses, found.hit_rate) == (0, 0, 0.0)


@pytest.mark.parametrize("options", [{}, {"device": "emulated", "gpu_memory": "300KB"}])
def test_an_eviction_that_slots_cannot_follow_is_refused_where_a_model_does_not_fit(
    packed: Path, profile: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("packed_reading", "disk_tier"):
        monkeypatch.setattr(f"tandem.hf.{module}.available_bytes", lambda: 800_000)
    monkeypatch.setattr("tandem.hf.disk_tier._RESERVED_BYTES", 0)
    more = {**options, "profile": profile} if options else {}
    with pytest.raises(ConfigError, match=r"eviction is 'fifo'.*one of next-use, lru; choose"):
        tandem.load(packed, eviction="fifo", **more)


def test_an_assignment_that_fetches_within_a_step_is_refused(packed: Path, profile: str) -> None:
    more: dict[str, Any] = {"device": "emulated", "gpu_memory": "300KB", "profile": profile}
    with pytest.raises(ConfigError, match=r"balanced-in-graph.*choose ready-on-gpu"):
        tandem.load(packed, expert_memory="1MB", assignment="balanced-in-graph", **more)


@pytest.mark.parametrize("eviction", ["next-use", "lru"])
def test_layers_of_different_numbers_of_experts_keep_the_eviction(
    eviction: str, tmp_path: Path
) -> None:
    store, counts = HostStore(), (8, 16, 5)
    generator = torch.Generator().manual_seed(0)
    for layer, count in enumerate(counts):
        shapes: dict[str, tuple[int, ...]] = {
            "gate_up_proj": (count, 64, 32),
            "down_proj": (count, 32, 32),
        }
        host = store.add_layer(f"layers.{layer}", shapes, expert_dtype=find_format("int8"))
        for name, shape in shapes.items():
            host.put(name, torch.randn(shape, generator=generator) / 4)
    calls = [
        (layer, *route(tokens, generator, Geometry(len(counts), counts[layer], 3)))
        for tokens in (1, 7, 40, 1, 1)
        for layer in range(len(counts))
    ]
    executor = CpuExecutor(store, CpuThreads(num_threads=1))
    expected = [executor.execute(*call, FUNCTIONS) for call in calls]
    slots = put_on_disk(store, tmp_path / "experts", 0.4, eviction=eviction)
    for call, right in zip(calls, expected, strict=True):
        assert torch.equal(executor.execute(*call, FUNCTIONS), right)
    assert slots.statistics().misses > 0
    assert [table is None for table in slots._tables] == [eviction == "lru"] * len(counts)


def test_memory_for_experts_of_a_model_that_is_not_packed_is_refused(
    packed: Path, tmp_path: Path
) -> None:
    plain = packed.with_name("plain")
    config = tandem.OffloadConfig(expert_memory="1GB")
    with pytest.raises(ConfigError, match="is not packed"):
        tandem.load(plain, expert_memory="1GB")
    with pytest.raises(ConfigError, match="is not packed"):
        AutoModelForCausalLM.from_pretrained(plain, quantization_config=config)
    fp32 = tandem.save(tandem.load(plain), tmp_path / "fp32")
    with pytest.raises(ConfigError, match="experts are plain"):
        tandem.load(fp32, expert_memory="1GB")


def in_the_hubs_cache(packed: Path, folder: Path) -> Path:
    """Return a snapshot in huggingface_hub's layout: links to files named by their hash."""
    snapshot, blobs = folder / "snapshots" / "1234", folder / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(packed.iterdir())):
        shutil.copyfile(file, blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:064x}")
    return snapshot


def test_a_model_in_the_hubs_cache_comes_from_the_disk(
    packed: Path, in_memory: Any, tmp_path: Path
) -> None:
    snapshot = in_the_hubs_cache(packed, tmp_path / "models--tiny")
    model = with_share(snapshot, 0.3)
    assert slots_of(model).has_sums
    with torch.inference_mode():
        assert torch.equal(model(ids(60)).logits, in_memory(ids(60)).logits)
    assert not mapped_tensors(model)


@pytest.mark.parametrize("load", [tandem.load, AutoModelForCausalLM.from_pretrained])
def test_a_model_that_does_not_fit_gets_slots_by_itself(
    load: Callable[[Path], Any], packed: Path, in_memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("packed_reading", "disk_tier"):
        monkeypatch.setattr(f"tandem.hf.{module}.available_bytes", lambda: 800_000)
    monkeypatch.setattr("tandem.hf.disk_tier._RESERVED_BYTES", 0)
    with pytest.warns(UserWarning, match="stay in memory"):
        model = load(packed)
    assert 0 < slots_of(model).share < 1
    with torch.inference_mode():
        assert torch.equal(model(ids(60)).logits, in_memory(ids(60)).logits)


def test_a_device_in_the_hosts_memory_leaves_slots_the_rest(
    packed: Path, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("packed_reading", "disk_tier"):
        monkeypatch.setattr(f"tandem.hf.{module}.available_bytes", lambda: 1_000_000)
    monkeypatch.setattr("tandem.hf.disk_tier._RESERVED_BYTES", 0)
    with pytest.warns(UserWarning, match="stay in memory"):
        model = tandem.load(packed, device="emulated", gpu_memory="300KB", profile=profile)
    assert 0 < slots_of(model).num_bytes <= 700_000


def test_what_fits_is_as_it_was(packed: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runtime_in(tandem.load(packed)).host_slots is None


def test_slots_give_memory_back_and_take_it_again(packed: Path, in_memory: Any) -> None:
    model = with_share(packed, 0.8)
    slots = slots_of(model)
    least, most = EXPERTS // 4, max(slots.num_slots)
    with torch.inference_mode():
        for share, held in ((1.0, most), (least / most, least), (0.0, 0), (1.0, most)):
            slots.native.use_share(share)
            for seed in range(3):
                found, expected = (m(ids(100, seed)).logits for m in (model, in_memory))
                assert torch.equal(found, expected)
            assert [len(slots.native.resident(layer)) for layer in range(LAYERS)] == [held] * LAYERS


def test_the_watch_shrinks_slots_while_memory_is_short(packed: Path) -> None:
    slots = slots_of(with_share(packed, 0.8))
    free = iter([2_000_000, 1_000_000, 900_000, 0, 0, 10_000_000])
    watch = MemoryWatch(slots, lambda: next(free), 1_000_000, seconds=3600.0)
    shares = [watch.look(slots) for _ in range(6)]
    assert shares[:3] == [1.0, 1.0, 1.0]
    assert shares[2] > shares[3] >= shares[4]
    assert shares[4] > 0
    assert shares[5] == 1.0


def test_closing_ends_the_readers(packed: Path) -> None:
    model = with_share(packed, 0.3)
    runtime = runtime_in(model)
    with torch.inference_mode():
        model(ids(10))
    before = len(list(Path("/proc/self/task").iterdir()))
    runtime.close()
    del model, runtime
    assert len(list(Path("/proc/self/task").iterdir())) < before


_SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}  # numbers of the system call
_ATTRIBUTES = "IIQiIQQQ"


def slices_of_threads() -> dict[int, int]:
    """Return the scheduler's time slice of each thread of this process, in nanoseconds."""
    size = struct.calcsize(_ATTRIBUTES)
    found = {}
    for thread in map(int, os.listdir("/proc/self/task")):
        room = ctypes.create_string_buffer(size)
        number = _SCHED_GETATTR[platform.machine()]
        if ctypes.CDLL(None).syscall(number, thread, room, size, 0) == 0:
            found[thread] = struct.unpack(_ATTRIBUTES, room.raw)[5]
    return found


@pytest.mark.skipif(
    platform.system() != "Linux"
    or platform.machine() not in _SCHED_GETATTR
    or tuple(map(int, platform.release().split(".")[:2])) < (6, 12),
    reason="slices are a thread's own from Linux 6.12 on",
)
def test_readers_run_as_soon_as_they_wake(packed: Path) -> None:
    before = slices_of_threads()
    model = with_share(packed, 0.3)
    after = slices_of_threads()
    assert slots_of(model).num_slots
    assert [after[t] for t in after if t not in before].count(100_000) == 8


def test_a_prompt_reads_ahead_first_what_was_used_before(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_experts_per_tok": TOP_K, "num_hidden_layers": LAYERS}
    many = packed_model(tmp_path, num_experts=4 * EXPERTS, **sizes)
    model = with_share(many, 0.0, eviction="lru")
    misses = []
    with torch.inference_mode():
        for _ in range(2):
            model(torch.full((1, 40), 7))  # repeat one token: the same experts
            misses.append(slots_of(model).statistics().misses)
    # Half a layer's experts fit ahead; only the first layer's are never read ahead.
    assert misses[1] - misses[0] == TOP_K
