"""Measures one system under one limit: `python -m benchmarks.disk.worker JOB` prints JSON.

The process is already in its control group.
"""

import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `import tandem` sets it, here too late

from benchmarks.disk.bound import Costs
from benchmarks.disk.device import RESTED, DeviceBytes, DiskProbe
from benchmarks.disk.job import Job
from benchmarks.disk.measuring import (
    Watch,
    decode_report,
    measure_decoding,
    measure_prompts,
    planned_trace,
    resident_costs,
    watch_of,
)
from benchmarks.disk.model import RunningModel, load_first_layers, load_model
from benchmarks.disk.routing import forced_trace

from tandem.bench.peers.llama_bench import LlamaBench
from tandem.bench.peers.llama_cpp import LlamaCpp
from tandem.bench.peers.setting import Setting
from tandem.checkpoint.packed import DENSE_FILE
from tandem.experts.store.packed_layer import PackedLayer
from tandem.hf.runtime import require_runtime

_MORE_TOKENS = 4096  # of a trace, for what comes after the measured steps
_BLOCK_STEPS = 16
_TURNS = 20
_FIRST_STEPS = 100  # until rare experts have come too


def main() -> None:
    """Run a job."""
    words = json.loads(sys.argv[1])
    paths = {name: Path(words[name]) for name in ("folder", "gguf") if words[name]}
    job = Job(**words | paths)
    measure = {"fit": measure_fit, "llama.cpp": measure_rival, "rival": measure_rival}
    print(json.dumps(measure.get(job.system, measure_tier)(job)), flush=True)
    os._exit(0)  # without giving gigabytes back one by one


def measure_tier(job: Job) -> dict[str, Any]:
    """Measure the whole model: cold, decoding, prompts."""
    trace = again = None
    if job.routing != "own":
        num_tokens = job.cold_prompt + job.warm_up + job.steps + _MORE_TOKENS
        trace = forced_trace(job.routing, job.moe_layers, job.num_experts, num_tokens, job.top_k)
        trace, again = planned_trace(trace, job)
    begin, device = time.perf_counter(), DeviceBytes(job.folder)
    before = device.read()
    notes = job.folder / "trials"
    is_first_start = not notes.is_dir()
    model = load_model(job)
    report: dict[str, Any] = {
        "load_seconds": time.perf_counter() - begin, "is_first_start": is_first_start,
    }  # fmt: skip
    running = RunningModel(model, job.prompt + job.steps + 64, notes)
    report["ready_seconds"] = time.perf_counter() - begin
    watch = watch_of(running, trace, job.folder, job.look_ahead)
    watch.time(lambda: running.prompt(job.cold_prompt), job.cold_prompt)
    report |= {
        "first_token_seconds": time.perf_counter() - begin,
        "cold_device_bytes": device.read() - before,
    }
    layers = [layer for layer in require_runtime(model).store if isinstance(layer, PackedLayer)]
    size = layers[0].layout.num_bytes
    files = [f for f in job.folder.glob("*.safetensors") if f.name != DENSE_FILE]
    probe = DiskProbe(files, size)
    samples = measure_decoding(running, watch, probe, job)
    rates = {depth: statistics.median(found) for depth, found in probe.rates.items()}
    costs = None
    if trace is not None and watch.slots is not None:
        assert watch.routing is not None
        assert watch.routing.at == again
        top_k = trace.experts.shape[2]
        dense, expert = resident_costs(running, watch, top_k)
        costs = Costs(dense, expert, size, max(rates.values()))
    report |= {"disk_rates": rates, "decode": decode_report(samples, costs)}
    if costs is not None:
        rested = decode_report(samples, replace(costs, disk_rate=rates[RESTED]))
        report["decode"]["over_rested_bound"] = rested["over_bound"]
    report["prompts"] = _prompts(running, watch, job, size)
    report["cold_needed_bytes"] = sum(f.stat().st_size for f in job.folder.glob("*.safetensors"))
    if watch.slots is not None:
        report |= {
            "slots_share": watch.slots.share,
            "num_slots": watch.slots.num_slots,
            "slots_bytes": watch.slots.num_bytes,
            "huge_page_bytes": _huge_page_bytes(),
        }
    return report


def _huge_page_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


def _prompts(running: RunningModel, watch: Watch, job: Job, size: int) -> dict[str, Any]:
    samples = measure_prompts(running, watch, job)
    return {
        "seconds": [s.seconds for s in samples],
        "absent_bytes": [sum(s.absent) * size for s in samples],
        "read_bytes": [s.read_bytes for s in samples],
        "waited_seconds": [s.waited_seconds for s in samples],
        "device_bytes": [s.device_bytes for s in samples],
    }


def measure_fit(job: Job) -> dict[str, Any]:
    """Measure layers that fit in memory, in slots and mapped, in ABBA order in one process."""
    trace = None
    if job.routing != "own":
        trace = forced_trace(job.routing, job.fit_layers, job.num_experts, _MORE_TOKENS, job.top_k)
    running = {}
    for name in ("slots", "mapped"):
        model = load_first_layers(job, has_slots=name == "slots")
        running[name] = RunningModel(model, job.prompt + _FIRST_STEPS + 64)
        watch_of(running[name], trace, job.folder)
        for _ in range(2):
            running[name].prompt(job.prompt)
        for _ in range(_FIRST_STEPS):
            running[name].step()
    found: dict[str, dict[str, list[float]]] = {
        name: {"step": [], "prompt": []} for name in running
    }
    for turn in range(_TURNS):
        for name in ("slots", "mapped")[:: 1 if turn % 2 else -1]:
            begin = time.perf_counter()
            running[name].prompt(job.prompt)
            found[name]["prompt"].append(time.perf_counter() - begin)
            seconds = []
            for _ in range(_BLOCK_STEPS):
                begin = time.perf_counter()
                running[name].step()
                seconds.append(time.perf_counter() - begin)
            found[name]["step"].append(statistics.median(seconds[2:]))
    return {
        "seconds": {n: {k: statistics.median(v) for k, v in f.items()} for n, f in found.items()},
        "speed_over_mapped": {
            kind: statistics.median(
                b / a for a, b in zip(found["slots"][kind], found["mapped"][kind], strict=True)
            )
            for kind in ("step", "prompt")
        },
    }


def measure_rival(job: Job) -> dict[str, Any]:
    """Measure another program on a mapped GGUF file with the file's own blocks."""
    assert job.gguf is not None
    setting = Setting(
        gguf=job.gguf, threads=job.threads, prompt=job.prompt, steps=job.steps, may_repack=False,
    )  # fmt: skip
    device = DeviceBytes(job.gguf)
    begin, before = time.perf_counter(), device.read()
    system = LlamaBench(job.command, setting) if job.command else LlamaCpp(setting)
    speeds = system.measure(0)
    return {
        "decode": {"ms": 1e3 / speeds.decode},
        "prompts": {"seconds": [job.prompt / speeds.prefill]},
        "seconds": time.perf_counter() - begin,
        "device_bytes": device.read() - before,
    }


if __name__ == "__main__":
    main()
