"""Tests of `tandem plan` for a GPU: slots, and a speed from a profile and typical routing."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from tandem.bench.model_shapes import MODEL_SHAPES
from tandem.cli.main import main
from tandem.forecast.disk_forecast import DiskForecast, SlotsOverDisk, forecast_with_gpu
from tandem.forecast.gpu_forecast import (
    GpuRun,
    costs_for,
    geometry_of,
    measured_shape,
)
from tandem.forecast.sizes import ModelSizes, config_sizes, model_sizes
from tandem.hardware.profiles import load_profile
from tandem.hf.checkpoint import open_model
from tandem.hf.config import OffloadConfig
from tandem.policy.cost import DiskCosts
from tandem.policy.plan import Geometry
from tandem.policy.settings import PlannerSettings
from tandem.policy.step_path import step_path
from tandem.sim.typical_routing import typical_routing

DESKTOP = load_profile("desktop-12gb")


def sizes_of(name: str, **changes: Any) -> ModelSizes:
    shape, own = MODEL_SHAPES[name], {"dense_dtype", "device"}
    values = {key: value for key, value in changes.items() if key not in own}
    config = AutoConfig.for_model(shape.model_type, **(shape.values | values))
    config.dtype = torch.bfloat16
    options = {key: value for key, value in changes.items() if key in own}
    return config_sizes(config, OffloadConfig(expert_dtype="int4", **options))


def test_a_shape_of_the_profile_costs_what_the_profile_says() -> None:
    assert costs_for(sizes_of("qwen3-30b-a3b"), DESKTOP) == DESKTOP.shape("qwen3-30b-a3b")


def test_another_shape_costs_in_proportion_to_its_bytes() -> None:
    known = DESKTOP.shape("qwen3-30b-a3b")
    costs = costs_for(sizes_of("qwen3-30b-a3b", moe_intermediate_size=1536), DESKTOP)
    assert costs.expert_bytes == 2 * known.expert_bytes
    assert costs.cpu_seconds == tuple(2 * seconds for seconds in known.cpu_seconds)
    assert costs.link_seconds_per_expert == 2 * known.link_seconds_per_expert
    assert costs.dense_seconds == known.dense_seconds  # attention is the same


def test_packed_dense_parts_make_few_tokens_faster_and_the_many_of_a_prompt_not() -> None:
    known = DESKTOP.shape("qwen3-30b-a3b")
    plain, packed = (
        costs_for(sizes_of("qwen3-30b-a3b", dense_dtype=name, device="cuda"), DESKTOP)
        for name in ("none", "auto")
    )
    assert plain.dense_seconds == known.dense_seconds
    assert packed.dense_seconds[0] < 0.8 * known.dense_seconds[0]
    assert packed.dense_seconds[0] > 60e-6  # launches stay
    assert packed.dense_seconds[-1] == known.dense_seconds[-1]


def test_more_slots_make_it_faster() -> None:
    sizes = sizes_of("qwen3-30b-a3b", num_hidden_layers=6)
    all_experts = sizes.num_experts
    slots = (all_experts // 8, all_experts // 2, all_experts)
    path = step_path(DESKTOP, None, None)
    found = [GpuRun(sizes, DESKTOP, PlannerSettings(), count, path).forecast() for count in slots]
    hits = [forecast.hit_rate for forecast in found]
    seconds = [forecast.decode_seconds for forecast in found]
    assert hits == sorted(hits)
    assert hits[-1] > 0.8  # the CPU helps with the prompt
    assert seconds == sorted(seconds, reverse=True)


def test_reads_of_a_disk_are_in_a_forecast() -> None:
    sizes = sizes_of("qwen3-30b-a3b", num_hidden_layers=6)
    path, settings = step_path(DESKTOP, None, None), PlannerSettings()
    in_memory = GpuRun(sizes, DESKTOP, settings, sizes.num_experts // 4, path).forecast()

    def over(share: float, rate: float) -> DiskForecast:
        disk = DiskCosts(reads="direct", piece_bytes=1, depths=(1,), bytes_per_second=(rate,))
        return forecast_with_gpu(in_memory, disk, SlotsOverDisk(share, 0, 0))

    shares = [over(share, 2e9) for share in (0.2, 0.5, 1.0)]
    seconds = [found.decode_seconds for found in shares]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == pytest.approx(in_memory.decode_seconds, rel=0.01)
    assert [found.hit_rate for found in shares] == sorted(found.hit_rate for found in shares)
    assert shares[-1].hit_rate == 1.0
    assert over(0.2, 8e9).decode_seconds < seconds[0]
    assert over(0.2, 8e9).prefill_seconds < shares[0].prefill_seconds


def test_layers_by_token_are_known_to_a_forecast() -> None:
    """Both the forecast and a run know the first three layers of DeepSeek-V4-Flash."""
    options = OffloadConfig(device="cuda")
    sizes = sizes_of("deepseek-v4-flash", num_hidden_layers=5)
    assert sizes.by_token == (0, 1, 2)
    settings, path = options.planner_settings(), step_path(DESKTOP, None, None)
    known, unknown = (
        GpuRun(each, DESKTOP, settings, sizes.num_experts // 4, path).forecast()
        for each in (sizes, dataclasses.replace(sizes, by_token=()))
    )
    assert known.hit_rate > unknown.hit_rate
    assert known.decode_seconds < unknown.decode_seconds


def test_typical_routing_is_like_recorded_routing() -> None:
    trace = typical_routing(Geometry(4, 64, 6), num_sequences=1, num_tokens=400)
    trace.check("typical")
    pairs = zip(trace.experts[1:], trace.experts[:-1], strict=True)
    kept = [
        len(np.intersect1d(a, b)) / 6 for now, then in pairs for a, b in zip(now, then, strict=True)
    ]
    assert 0.2 < float(np.mean(kept)) < 0.45  # at random: 0.09


def test_geometry_of_layers_with_several_sizes() -> None:
    sizes = dataclasses.replace(sizes_of("qwen3-30b-a3b"), num_experts=48 * 128 - 1)
    assert geometry_of(sizes) == Geometry(48, 128, 8)


def test_a_plan_for_a_gpu_that_is_elsewhere(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--device", "cuda", "--profile", "desktop-12gb", "--expert-dtype", "int4"]
    assert main(["plan", str(checkpoint), *words, "--json"]) == 0
    out = capsys.readouterr().out
    assert "on desktop-12gb and typical routing" in out
    assert "times too fast" in out
    report = json.loads(out.splitlines()[-1])
    assert report["expert_slots"] == report["experts"]  # tiny: all of them
    config = OffloadConfig(device="cuda", expert_dtype="int4", dense_dtype="auto")
    sizes = model_sizes(open_model(checkpoint), config)
    dense = sum(report["parts_bytes"].values()) - report["parts_bytes"]["experts"]
    assert report["gpu_bytes"]["dense"] == sizes.device_bytes == dense - sizes.host_bytes
    assert report["load_host_bytes"] - sizes.host_bytes - sizes.experts_bytes > 0  # the program
    assert report["gpu_bytes"]["kv_cache"] == report["kv_cache_bytes"]
    assert report["decode_tokens_per_second"] > 0
    assert report["profile"] == "desktop-12gb"
    assert report["gpu_available_bytes"] == DESKTOP.gpu_memory_bytes
    assert report["host_path"] == "graph"
    assert "the graph path's host costs" in out
    assert "left free" in out


def test_a_plan_for_a_shape_alone_on_another_machine(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--shape", "lfm2-8b-a1b", "--device", "cuda", "--expert-dtype", "int4"]
    reports = {}
    for path in ("segments", "graph"):
        machine = ["--profile", "laptop-8gb", "--host-path", path, "--json"]
        assert main(["plan", *words, *machine]) == 0
        reports[path] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {path: report["host_path"] for path, report in reports.items()} == dict(
        zip(reports, reports, strict=True)
    )
    slow, fast = (report["decode_tokens_per_second"] for report in reports.values())
    assert slow < fast
    laptop = load_profile("laptop-8gb").host_memory_bytes
    # Memory that this process itself uses.
    assert {report["host_available_bytes"] for report in reports.values()} == {laptop - (4 << 30)}
    assert main(["plan", "--shape", "lfm2"]) == 2
    assert "unknown shape 'lfm2'; known: qwen3-30b-a3b" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_plan_for_a_gpu_that_is_not_here(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(checkpoint), "--device", "cuda"]) == 2
    assert "name its profile (--profile desktop-12gb" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("qwen3.6-35b-a3b", 10 * 2 * 2 * 256 * 2),
        ("gemma4-26b-a4b", (25 * 8 * 256 + 5 * 2 * 512) * 2 * 2),
        ("lfm2-8b-a1b", 6 * 2 * 8 * 64 * 2),
        ("nemotron-3-nano", 6 * 2 * 2 * 128 * 2),
    ],
)
def test_layers_without_keys_take_nothing_for_tokens(name: str, num_bytes: int) -> None:
    assert sizes_of(name).kv.token_bytes == num_bytes


def test_a_gpu_keeps_latents_expanded() -> None:
    sizes = sizes_of("deepseek-v2-lite")
    assert sizes.kv.token_bytes == 27 * (2 * 512 + 64) * 2
    assert sizes.device_kv.device_bytes_of(1000) == 1000 * 27 * (512 + 64) * 2


def test_what_windows_keep_is_counted_by_layer() -> None:
    sizes = sizes_of("gemma4-26b-a4b")
    more = sizes.kv.bytes_of(200_000) - sizes.kv.bytes_of(100_000)
    assert more == 100_000 * 5 * 2 * 512 * 2 * 2  # of whole layers alone
    assert sizes.top_k == 8


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_a_machine_is_measured_on_layers_with_experts(name: str) -> None:
    shape = measured_shape(sizes_of(name))
    config = AutoConfig.for_model(shape.model_type, **shape.values)
    config.dtype = torch.bfloat16
    assert 1 <= config_sizes(config, OffloadConfig()).num_moe_layers <= 2
