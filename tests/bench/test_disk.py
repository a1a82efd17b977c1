"""Tests of the disk benchmark's own computations: bounds, misses of LRU, routing, the report."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.disk.__main__ import cut_shape, jobs_of, packed_model, read_options
from benchmarks.disk.bound import Costs, LruSlots, step_bound
from benchmarks.disk.device import DEPTHS, DiskProbe
from benchmarks.disk.memory_group import ROOT, limited
from benchmarks.disk.model import RunningModel
from benchmarks.disk.report import lines
from benchmarks.disk.routing import forced_trace

import tandem
from tandem.hardware.page_cache import how_reads_go
from tandem.hf.dense_files import packed_formats
from tests.architecture_sizes import TOP_K
from tests.bench.test_random_model import tiny
from tests.conftest import REPOSITORY
from tests.disk.loading import slots_of, with_share

COSTS = Costs(dense_seconds=0.010, expert_seconds=0.001, expert_bytes=2_000_000, disk_rate=1e9)
GPT_OSS = str(REPOSITORY / "data" / "traces" / "gpt-oss-20b.npz")
KEPT_BYTES = 64 << 20
PAGE = 4096
EXPERTS = 16


def test_a_layer_takes_the_longer_of_its_reads_and_its_residents() -> None:
    assert step_bound([0, 2, 3], [4, 4, 4], COSTS) == pytest.approx(0.010 + 0.004 + 0.004 + 0.006)


def test_lru_forgets_what_was_used_longest_ago() -> None:
    slots = LruSlots(3)
    assert [slots.use(token) for token in ([0, 1], [1, 2], [3, 1], [0, 2])] == [2, 1, 1, 1]


def test_synthetic_routing_has_the_hit_rate_that_is_reported_of_the_model() -> None:
    trace = forced_trace("synthetic", 48, 128, 400)
    again = forced_trace("synthetic", 48, 128, 20)
    assert np.array_equal(trace.experts[:20], again.experts)
    rates = []
    for layer in range(0, 48, 6):
        slots = LruSlots(128 * 13 // 100)
        misses = [slots.use(map(int, token)) for token in trace.experts[:, layer]]
        rates.append(1 - sum(misses[200:]) / (8 * 200))
    assert 0.6 < np.mean(rates) < 0.75


def test_a_trace_of_a_quarter_of_the_experts_is_merged_and_repeated() -> None:
    trace = forced_trace(GPT_OSS, 20, 128, 0)
    assert trace.experts.shape[1:] == (20, 8)
    assert (trace.meta.n_experts, trace.meta.n_moe_layers) == (128, 20)
    assert not np.array_equal(trace.experts[:, 0], trace.experts[:, 6])
    with pytest.raises(SystemExit, match="is of 32 experts, the shape has 256"):
        forced_trace(GPT_OSS, 20, 256, 0)


def test_synthetic_routing_of_fewer_experts() -> None:
    trace = forced_trace("synthetic", 43, 28, 30, 6)
    assert trace.experts.shape == (30, 43, 6)
    assert trace.experts.max() == 27
    assert all(len(set(token)) == 6 for token in trace.experts[:, 0].tolist())
    with pytest.raises(SystemExit, match="of 48 layers of 128 experts, the shape has 43 of 256"):
        forced_trace("synthetic", 43, 256, 30, 6)


def test_a_shape_is_cut_and_packed_whole(tmp_path: Path) -> None:
    """A tiny DeepSeek-V4: two of its layers are routed by token, and its dense parts are packed."""
    words = ["--shape", "deepseek-v4-flash", "--experts", str(EXPERTS), "--layers", "4"]
    words += ["--expert-dtype", "mxfp4", "--dense-dtype", "fp8", "--pack-dense"]
    options = read_options([*words, "--vocabulary", "512", "--folder", str(tmp_path)])
    cut = cut_shape(options)
    assert (cut.values["n_routed_experts"], cut.values["vocab_size"]) == (EXPERTS, 512)
    shape = tiny("deepseek-v4-flash", n_routed_experts=EXPERTS, vocab_size=512).sample(4)
    folder = packed_model(options, shape)
    assert folder.name == f"deepseek-v4-flash-4-512-mxfp4-{EXPERTS}-experts-fp8"
    job = jobs_of(options, folder, shape)["slots"]
    assert (job.moe_layers, job.num_experts, job.top_k) == (4, EXPERTS, TOP_K)
    files = packed_formats(tandem.load(folder, dense_dtype="fp8", threads=1))
    assert set(files.values()) == {"fp8"}
    reads_what_is_forced(folder)


def reads_what_is_forced(folder: Path) -> None:
    """Assert that layers routed by token read ahead exactly the experts that the trace names."""
    model = with_share(folder, 0.3, dense_dtype="fp8", threads=1)
    trace = forced_trace("synthetic", 4, EXPERTS, 60, TOP_K)
    running, slots = RunningModel(model, 64), slots_of(model)
    routing = running.force(trace)
    running.prompt(9)
    # A trial computes a step twice, and repeats reads that were late the first time.
    for _ in range(4):
        running.step()
    for _ in range(20):
        uses, chosen = slots.statistics(), trace.experts[routing.at].tolist()
        absent = (set(c).difference(slots.native.resident(n)) for n, c in enumerate(chosen))
        expected = PAGE * sum(map(len, absent))  # an expert is less than a page
        running.step()
        now = slots.statistics()
        assert now.hits + now.misses - uses.hits - uses.misses == 4 * TOP_K  # computed once
        assert now.read_bytes - uses.read_bytes == expected
    with pytest.raises(SystemExit, match=r"routing is of 3 experts a token, and a table .* has 2"):
        running.force(forced_trace("synthetic", 4, EXPERTS, 60, 3))


def test_the_probe_reads_at_each_depth(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(4 << 20))
    if how_reads_go(file) == "refused":
        with pytest.raises(OSError, match="Invalid argument"):
            DiskProbe([file], 100_000)
        return
    probe = DiskProbe([file], 100_000)
    for _ in probe.rates:
        probe.measure()
    assert [len(rates) for rates in probe.rates.values()] == [1] * (len(DEPTHS) + 1)
    assert all(rate > 0 for rates in probe.rates.values() for rate in rates)


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.access(ROOT, os.W_OK), reason="control groups are made by root"
)
def test_a_limit_kills_what_takes_more_and_is_gone_afterwards() -> None:
    program = "import sys; len(bytearray(int(sys.argv[1])))"
    try:
        with limited(KEPT_BYTES) as group:
            assert group is not None
            directory = group.directory
            codes = [
                subprocess.run(
                    [sys.executable, "-c", program, str(size)], preexec_fn=group.enter, check=False
                ).returncode
                for size in (KEPT_BYTES // 8, 2 * KEPT_BYTES)
            ]
    except OSError as error:
        pytest.skip(f"no control group with a limit here: {error}")
    assert codes == [0, -9]
    assert not directory.exists()


def test_a_report_has_ratios_of_turns_and_counts_runs_that_failed() -> None:
    def run(milliseconds: float) -> dict[str, Any]:
        return {"decode": {"ms": milliseconds}, "prompts": {"seconds": [1.0]}, "kills": 0}

    mapped = [run(50.0), {"failed": -9, "kills": 1}]
    text = lines({"12 GB": {"slots": [run(10.0), run(20.0)], "mapped": mapped}}, None)
    assert "| slots over mapped | decode, prompt | 5.0, 1.0 |" in text
    assert "| mapped | runs that ended with an error | 1 |" in text
    assert "| slots | decode, ms a token | 15.0 |" in text
