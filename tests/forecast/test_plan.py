"""Tests of `tandem plan`: sizes as loaded, advice that fits, and the keys of its JSON."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.bench.model_shapes import MODEL_SHAPES
from tandem.cli.main import main
from tandem.core.errors import CapacityError
from tandem.experts.cache.host_slots import share_of
from tandem.forecast import disk_forecast
from tandem.forecast.disk_forecast import (
    DiskForecast,
    SlotsOverDisk,
    forecast_from_disk,
    slots_over_disk,
)
from tandem.forecast.gpu_forecast import geometry_of
from tandem.forecast.model_plan import FORWARD_BYTES
from tandem.forecast.sizes import ModelSizes, model_sizes
from tandem.forecast.speed_forecast import SpeedForecast
from tandem.forecast.workspace import workspace_bytes
from tandem.hardware.profiles import load_profile, save_profile
from tandem.hf.checkpoint import open_checkpoint
from tandem.hf.config import OffloadConfig
from tandem.hf.packed_layers import PackedModule
from tandem.policy.cost import DiskCosts, whole_pages
from tandem.sim.typical_routing import typical_routing
from tandem.trace import write_trace
from tests.disk.loading import slots_of
from tests.hf.tiny import save_tiny_checkpoint
from tests.inside import runtime_in
from tests.loading.checkpoints import FORMATS, lose_tensors, write_plain, write_quantised

JSON_KEYS = {
    *("fits", "host_bytes", "gpu_bytes", "expert_slots", "prefill_tokens_per_second"),
    *("decode_tokens_per_second", "advice"),
}


def sizes_of(directory: Path, **options: Any) -> ModelSizes:
    return model_sizes(open_checkpoint(directory), OffloadConfig(**options))


def loaded_bytes(model: Any) -> tuple[int, int]:
    """Return the bytes of a loaded model's experts and of its other weights."""
    packed = [m.packed for m in model.modules() if isinstance(m, PackedModule)]
    own = {weight.matrix.data.data_ptr(): weight for weight in packed}  # a head may share one
    dense = sum(weight.num_bytes for weight in own.values())
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    return runtime_in(model).store.num_bytes, dense + sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize(
    "options",
    [{}, {"expert_dtype": "int4", "dense_dtype": "auto"}, {"expert_dtype": "fp32"}],
    ids=["as-it-is", "int4", "fp32"],
)
@pytest.mark.parametrize("architecture", ["mixtral", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_sizes_are_those_of_the_load(
    architecture: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    directory = save_tiny_checkpoint(tmp_path / "tiny", architecture)
    sizes = sizes_of(directory, **options)
    found = loaded_bytes(tandem.load(directory, **options))
    assert (sizes.experts_bytes, sizes.total_dense_bytes) == found


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_sizes_of_a_quantised_checkpoint(name: str, tmp_path: Path) -> None:
    fmt = FORMATS[name]
    plain = write_plain(tmp_path / "plain", fmt.architecture)
    directory = write_quantised(tmp_path / "quantised", plain, fmt)
    assert sizes_of(directory).experts_bytes == loaded_bytes(tandem.load(directory))[0]


def test_sizes_of_a_packed_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    tandem.pack(checkpoint, tmp_path / "packed", expert_dtype="int4", dense_dtype="int8")
    found = loaded_bytes(tandem.load(tmp_path / "packed"))
    sizes = sizes_of(tmp_path / "packed")
    assert (sizes.experts_bytes, sizes.total_dense_bytes) == found


@pytest.mark.parametrize(
    ("architecture", "lost", "sentence"),
    [
        (
            "mixtral",
            "model.layers.2.block_sparse_moe.experts.5.w1.weight",
            "has 7 of the 8 tensors model.layers.*.block_sparse_moe.experts.*.w1.weight of model.",
        ),
        ("qwen3_moe", "model.layers.1.mlp.experts", "first is model.layers.1.mlp.experts"),
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj", "the first is model.layers.0.mlp"),
        ("qwen3_moe", "model.layers.3.self_attn.q_proj.weight", "first is model.layers.3.self_att"),
    ],
)
def test_a_checkpoint_that_lacks_tensors_is_no_plan(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    architecture: str,
    lost: str,
    sentence: str,
) -> None:
    directory = save_tiny_checkpoint(tmp_path / "tiny", architecture)
    lose_tensors(directory, lost)
    assert main(["plan", str(directory), "--no-measure"]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert "fits" not in captured.out


def test_speeds_of_a_text_model_that_is_none_by_itself_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(save_tiny_checkpoint(tmp_path / "tiny", "muse_spark"))
    assert main(["plan", directory, "--no-measure"]) == 0
    capsys.readouterr()
    assert main(["plan", directory, "--expert-dtype", "int8"]) == 2
    errors = capsys.readouterr().err
    assert "cannot build a text model of muse_spark_text," in errors
    assert "Traceback" not in errors


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, dict[str, Any]]:
    assert main(["plan", *words, "--json"]) == 0
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def test_says_bytes_and_verdict(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, report = plan(capsys, str(checkpoint), "--no-measure", "--context", "200")
    assert set(report) >= JSON_KEYS
    assert report["fits"] is True
    assert report["kv_cache_bytes"] == 200 * sizes_of(checkpoint).kv.token_bytes
    assert report["decode_tokens_per_second"] is None
    assert "fits:" in out
    assert any("tandem pack" in line for line in report["advice"])


def test_no_context_is_beyond_the_model_s(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, report = plan(capsys, str(checkpoint), "--no-measure")
    assert report["context_tokens"] == 256
    assert list(report["kv_cache_bytes_by_context"]) == ["256"]
    assert "KV cache by context: 256 " in out
    assert "(--no-measure)" in out
    _, report = plan(capsys, "--shape", "qwen3-30b-a3b", "--no-measure")
    assert report["context_tokens"] == 4096
    assert list(report["kv_cache_bytes_by_context"]) == ["2048", "8192", "32768", "40960"]
    assert main(["plan", str(checkpoint), "--no-measure", "--context", "257"]) == 2
    errors = capsys.readouterr().err
    assert "--context is 257 tokens, and the model's context has 256; give at most that" in errors


def test_an_unknown_shape_gets_all_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--shape", "gpt-oss-120b"]) == 2
    errors = capsys.readouterr().err
    assert "unknown shape 'gpt-oss-120b'; did you mean 'gpt-oss-20b'? known: " in errors
    assert [name for name in MODEL_SHAPES if name not in errors] == []


def test_slots_of_a_device(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = sizes_of(checkpoint, expert_dtype="int4").expert_image_bytes
    words = ["--device", "emulated", "--expert-dtype", "int4", "--gpu-memory", str(5 * image)]
    _, report = plan(capsys, str(checkpoint), *words)
    assert report["expert_slots"] == 5
    assert report["gpu_bytes"]["experts"] == 5 * image
    assert set(report["gpu_bytes"]) == {"dense", "kv_cache", "experts", "workspace"}
    assert report["decode_tokens_per_second"] > 0
    assert 0 < report["hit_rate"] < 1


def test_what_would_make_it_fit(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = sizes_of(checkpoint)
    words = [str(checkpoint), "--no-measure", "--context", "16"]
    _, report = plan(capsys, *words)
    rest = report["host_bytes"] - report["load_host_bytes"] + sizes.total_dense_bytes
    room = rest + sizes.experts_bytes // 2
    monkeypatch.setattr("tandem.experts.store.host_memory.available_bytes", lambda: room)
    _, report = plan(capsys, *words)
    assert report["fits"] is False
    assert any(
        "with int8 experts it fits" in line or "with int4" in line for line in report["advice"]
    )


def test_a_packed_model_that_does_not_fit_runs_from_the_disk(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = tandem.pack(checkpoint, tmp_path / "packed", expert_dtype="int8").directory
    words = [str(packed), "--context", "16", "--threads", "1"]
    out, before = plan(capsys, *words)
    assert before["from_disk"] is None
    assert "from the disk" not in out
    sizes = sizes_of(packed, dense_dtype="auto")
    experts = sizes.experts_bytes
    rest = before["host_bytes"] - before["load_host_bytes"] + sizes.total_dense_bytes
    rest -= FORWARD_BYTES  # which is not available for slots
    for name in ("_RESERVED_BYTES", "_RESERVED_SHARE"):
        monkeypatch.setattr(f"tandem.hf.disk_tier.{name}", 0)
    monkeypatch.setattr(
        "tandem.experts.store.host_memory.available_bytes", lambda: rest + experts * 3 // 4
    )
    out, after = plan(capsys, *words)
    found = after["from_disk"]
    assert 0.2 < found["resident_share"] < 0.75  # beside the slots that layers share
    assert 0.2 < found["hit_rate"] < 1
    assert found["disk_bytes_per_second"] > 0
    assert found["prefill_tokens_per_second"] <= after["prefill_tokens_per_second"]
    assert f"from the disk: {found['resident_share']:.0%} of the experts fit" in out
    monkeypatch.setattr("tandem.experts.store.host_memory.available_bytes", lambda: rest - 1)
    assert plan(capsys, *words)[1]["from_disk"] is None  # not even the dense parts


def test_a_plan_that_measures_nothing_says_what_slots_there_are(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.experts.store.host_memory.process_bytes", lambda: 1 << 28)
    packed = tandem.pack(checkpoint, tmp_path / "packed", expert_dtype="int8").directory
    most = sizes_of(packed).experts_bytes
    words = ["--no-measure", "--context", "16", "--expert-memory", str(most - 1)]
    out, report = plan(capsys, str(packed), *words)
    slots = slots_of(tandem.load(packed, expert_memory=str(most - 1)))
    assert report["from_disk"]["slots"] == sum(slots.num_slots) > 0
    assert report["from_disk"]["resident_share"] == pytest.approx(slots.share)
    assert "decode_tokens_per_second" not in report["from_disk"]
    sentence = f"{slots.share:.0%} of the experts fit into {sum(slots.num_slots)} slots, the others"
    assert sentence in out
    assert "the disk's rate was not measured" in out
    with_device = ["--device", "emulated", "--gpu-memory", "1MB"]
    simulated = plan(capsys, str(packed), *words[1:], *with_device)[1]["from_disk"]
    assert 0 < simulated["slots"] < sum(slots.num_slots)  # copies to a device take three more
    assert f"fit into {simulated['slots']} " in plan(capsys, str(packed), *words, *with_device)[0]
    assert simulated["decode_tokens_per_second"] > 0
    elsewhere = [*words[1:], "--profile", "desktop-12gb", "--device", "cuda"]
    assert "the disk's rate was not measured" in plan(capsys, str(packed), *elsewhere)[0]
    before = plan(capsys, str(packed), "--no-measure", "--context", "16")[1]
    saved = before["host_bytes"] - report["host_bytes"]
    assert saved == most - report["from_disk"]["memory_bytes"]
    assert report["from_disk"]["memory_bytes"] == slots.num_bytes


def test_a_plan_has_the_model_that_drafts(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.experts.store.host_memory.process_bytes", lambda: 1 << 28)
    words = ["--no-measure", "--context", "64", "--sequences", "3"]
    alone = plan(capsys, str(checkpoint), *words)[1]
    out, drafted = plan(capsys, str(checkpoint), *words, "--draft", str(checkpoint))
    small = sizes_of(checkpoint, dense_dtype="none", threads=1)
    assert drafted["draft_bytes"] == small.total_bytes + 3 * small.kv.bytes_of(64)
    more = {name: drafted[name] - alone[name] for name in ("host_bytes", "workspace_bytes")}
    assert more["workspace_bytes"] == alone["workspace_bytes"]  # the same model reads the prompt
    assert more["host_bytes"] == drafted["draft_bytes"] + more["workspace_bytes"]
    assert "draft model and its KV cache" in out


def test_a_plan_refuses_slots_for_experts_in_fp32(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tandem.save(tandem.load(checkpoint, expert_dtype="fp32"), tmp_path / "packed")
    for model in (checkpoint, packed):
        words = [str(model), "--no-measure", "--expert-memory", "1MB"]
        assert main(["plan", *words, "--expert-dtype", "fp32"]) == 2
        assert "this model's experts are plain (fp32)" in capsys.readouterr().err


SPEED = SpeedForecast(256, 2.0, 0.1, 4, 2.0, 1.0)


def forecast_at(
    sizes: ModelSizes, rate: float, share: float
) -> tuple[DiskForecast, SlotsOverDisk, int]:
    """Return the forecast with slots for a share of the experts, and the memory of these slots."""
    disk = DiskCosts(
        reads="direct", piece_bytes=1, depths=(1, 2), bytes_per_second=(rate / 2, rate)
    )
    slot = whole_pages(sizes.expert_image_bytes)
    counts = [sizes.num_experts // sizes.num_moe_layers] * sizes.num_moe_layers
    least = next(n for n in range(1000) if _fits(n * slot, slot, counts))
    room = least * slot + int(share * sizes.num_experts * slot) + 1
    slots = slots_over_disk(sizes, room, has_device=False)
    return forecast_from_disk(sizes, SPEED, disk, slots), slots, room


def _fits(memory: int, slot: int, counts: list[int]) -> bool:
    try:
        share_of(memory, [slot] * len(counts), counts, has_device=False)
    except CapacityError:
        return False
    return True


@pytest.mark.parametrize(("rate", "share"), [(1e6, 0.5), (1e6, 0.0), (1e15, 0.5), (1e6, 1.0)])
def test_from_the_disk_a_step_takes_what_its_bytes_take(
    checkpoint: Path, rate: float, share: float
) -> None:
    sizes = sizes_of(checkpoint, expert_dtype="int8")
    found, slots, _ = forecast_at(sizes, rate, share)
    assert slots.share == pytest.approx(share, abs=1e-3)
    assert slots.num_slots == int(8 * share) * sizes.num_moe_layers
    assert (found.hit_rate == 0) == (share == 0)
    slot = whole_pages(sizes.expert_image_bytes)
    read = (1 - found.hit_rate) * sizes.top_k * sizes.num_moe_layers * slot / rate
    # Experts that have arrived are computed; experts computed meanwhile take no time.
    assert max(0.1, read) <= found.decode_seconds * (1 + 1e-9)
    assert found.decode_seconds <= (0.1 + read) * (1 + 1e-9)
    # A prompt of 256 uses all of the 8 experts of each layer.
    expected = max(2.0, (1 - slots.share) * sizes.experts_bytes / rate)
    assert found.prefill_seconds == pytest.approx(expected, rel=1e-3)
    with pytest.raises(CapacityError, match="and need at least"):
        slots_over_disk(sizes, slot, has_device=False)


def test_a_plan_from_the_disk_is_what_simulate_says_of_the_same_routing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes, rate = sizes_of(checkpoint, expert_dtype="int8"), 3e8
    planned, slots, room = forecast_at(sizes, rate, 0.5)
    geometry = geometry_of(sizes)
    trace = typical_routing(geometry, num_sequences=3, num_tokens=320)
    write_trace(tmp_path / "typical.npz", trace)
    here = dataclasses.replace(
        load_profile("desktop-12gb"), shapes=(disk_forecast.costs_in_memory(sizes, SPEED),)
    )
    save_profile(here, tmp_path / "here.json")
    words = ["--hardware", str(tmp_path / "here.json"), "--disk", "300MB/s", "--prompt", "256"]
    assert main(["simulate", str(tmp_path / "typical.npz"), *words, "--expert-memory", str(room),
                 "--json"]) == 0  # fmt: skip
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["decode_tokens_per_second"] == pytest.approx(1 / planned.decode_seconds)
    assert found["timed_hit_rate"] == planned.hit_rate
    assert found["host_experts"] == slots.share


def test_speed_is_measured_once_and_kept(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    words = [str(checkpoint), "--expert-dtype", "int4", "--threads", "1"]
    _, report = plan(capsys, *words)
    assert report["decode_tokens_per_second"] > 0
    kept = list((tmp_path / "forecasts").iterdir())
    assert len(kept) == 1
    assert plan(capsys, *words)[1]["decode_tokens_per_second"] == report["decode_tokens_per_second"]


def test_a_plan_counts_states_and_their_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = {"max_position_embeddings": 2048}
    directory = str(save_tiny_checkpoint(tmp_path / "tiny", "qwen3_5_moe", **longer))
    _, report = plan(capsys, directory, "--no-measure", "--context", "2048")
    held = report["state_bytes"] + report["checkpoint_bytes"] + report["kv_cache_bytes"]
    assert report["checkpoint_bytes"] == 5 * report["state_bytes"] > 0
    activations = workspace_bytes(sizes_of(Path(directory)), 2048)
    assert report["host_bytes"] == report["load_host_bytes"] + held + activations + FORWARD_BYTES
    _, report = plan(capsys, directory, "--no-measure", "--context", "64")
    assert report["checkpoint_bytes"] == 0


def test_sequences_at_once_take_their_keys_and_activations(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(checkpoint), "--no-measure", "--context", "100"]
    one, four = (plan(capsys, *words, "--sequences", n)[1] for n in ("1", "4"))
    assert four["kv_cache_bytes"] == 4 * one["kv_cache_bytes"]
    held = (report["host_bytes"] - report["load_host_bytes"] for report in (one, four))
    keys, sizes = one["kv_cache_bytes"], sizes_of(checkpoint)
    assert list(held) == [
        n * keys + workspace_bytes(sizes, n * 100) + FORWARD_BYTES for n in (1, 4)
    ]
    assert main(["plan", *words, "--sequences", "0"]) == 2


def test_a_plan_refuses_a_format_that_packed_files_do_not_have(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tandem.pack(checkpoint, tmp_path / "packed", expert_dtype="int4", dense_dtype="int8")
    assert packed.num_bytes
    words = [str(tmp_path / "packed"), "--no-measure"]
    assert main(["plan", *words, "--dense-dtype", "int4"]) == 2
    assert "is packed with dense_dtype 'int8-g128' and cannot be" in capsys.readouterr().err
