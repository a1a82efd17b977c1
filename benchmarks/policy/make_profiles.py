"""Make the built-in hardware profiles: `python -m benchmarks.policy.make_profiles`.

Each machine is a handful of numbers with their sources; the times of a model shape follow:
overhead + max(bytes / bandwidth, operations / peak) on the GPU, with the sum of both on the CPU,
where unpacking weights and arithmetic share the cores.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

from tandem.policy.cost import HardwareProfile, ShapeCosts
from tandem.policy.host_costs import HostCosts

PROFILES = Path(__file__).parents[2] / "src" / "tandem" / "hardware" / "profiles"
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
DENSE_BYTES_PER_WEIGHT = 2.0  # attention, router and shared experts stay in 16 bits


# What the host does around a layer, for PCs. No GPU has timed it yet; `HOST_SOURCE` says where each
# number is from, and every such profile repeats it.
HOST_COSTS = (
    HostCosts(
        path="segments",
        step_seconds=200e-6,
        layer_seconds=190e-6,
        cpu_begin_seconds=0.0,
        cpu_end_seconds=45e-6,
        fetch_seconds=22e-6,
    ),
    HostCosts(
        path="graph",
        step_seconds=150e-6,
        layer_seconds=4e-6,
        cpu_begin_seconds=6.5e-6,
        cpu_end_seconds=3e-6,
        fetch_seconds=22e-6,
    ),
)
HOST_SOURCE = (
    " Host costs: segments, measured on CPU twins of the GPU on a quiet host: 190 us from a choice "
    "to the experts at work, 31 to 60 us from the CPU's last row to the next layer "
    "(benchmarks.runtime.host_path), launches with their tables 150 to 200 us, one for eight "
    "fetched experts; a step's 200 us assumed. Graph: two kernels of about 2 us each, which ring "
    "and wait themselves; 4.4 and .8 us of the coordinator, measured on a twin on a quiet host "
    "(benchmarks.runtime.coordinator_latency), with about 2 us of the link each; a step's 150 us "
    "assumed."
)


class Shape(NamedTuple):
    """A model's sizes, from its config.json on Hugging Face."""

    name: str
    layers: int
    experts: int
    top_k: int
    expert_weights: int  # gate, up and down of one routed expert
    dense_weights: int  # attention, router and shared experts of one layer


SHAPES = (
    Shape("deepseek-v2-lite", 26, 64, 6, 3 * 2048 * 1408, 13_800_000 + 2 * 3 * 2048 * 1408),
    Shape("qwen3-30b-a3b", 48, 128, 8, 3 * 2048 * 768, 18_900_000),
    Shape("mixtral-8x7b", 32, 8, 2, 3 * 4096 * 14336, 41_900_000),
    Shape("gpt-oss-20b", 24, 32, 4, 3 * 2880 * 2880, 26_500_000),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a roofline needs to know; sources stand in `source`."""

    name: str
    source: str
    cpu: str
    gpu: str
    cpu_threads: int
    gpu_memory_gib: int
    host_memory_gib: int
    bits_per_weight: float
    link_gigabytes_per_second: float
    cpu_gigabytes_per_second: float
    cpu_gflops: float
    cpu_expert_overhead_seconds: float
    cpu_first_expert_seconds: float
    gpu_gigabytes_per_second: float
    gpu_gflops: float
    gpu_expert_overhead_seconds: float
    dense_overhead_seconds: float
    cpu_slowdown_while_copying: float
    link_slowdown_while_computing: float
    host: tuple[HostCosts, ...] = ()  # none: a paper's machine


MACHINES = (
    Machine(
        name="dali-testbed",
        source=(
            "DALI (arXiv 2602.03495) 6.1: EPYC 7532 limited to 16 cores, RTX 3090, PCIe 4.0 x16, "
            "4.5 bits a weight (papers.md 1.8). Link and CPU bandwidth: FreeToken's RTX 3090 "
            "machine, 25.3 and 56.7 GB/s (papers.md 3.3). GPU: 936 GB/s (DALI table 1), 35 TFLOPS "
            "at half of the data sheet's 71. CPU 786 GFLOPS, GPU overhead: from the Qwen3-like "
            "costs of papers.md 1.11 (.012 ms a token, .02 ms an expert). Eight memory channels: "
            "slowdowns 1.05, assumed. Speeds come out above table 9, whose overheads in Python "
            "are not modelled."
        ),
        cpu="AMD EPYC 7532, 16 cores",
        gpu="NVIDIA RTX 3090",
        cpu_threads=32,
        gpu_memory_gib=24,
        host_memory_gib=256,
        bits_per_weight=4.5,
        link_gigabytes_per_second=25.3,
        cpu_gigabytes_per_second=56.7,
        cpu_gflops=786.0,
        cpu_expert_overhead_seconds=4e-6,
        cpu_first_expert_seconds=20e-6,
        gpu_gigabytes_per_second=936.0,
        gpu_gflops=35_000.0,
        gpu_expert_overhead_seconds=15e-6,
        dense_overhead_seconds=60e-6,
        cpu_slowdown_while_copying=1.05,
        link_slowdown_while_computing=1.05,
    ),
    Machine(
        name="collab-testbed",
        source=(
            "Paper 2 (arXiv 2512.16473) table I, one bf16 Mixtral expert of 352 MB: CPU 7.3 ms at "
            "24 threads (48.3 GB/s), transfer 28.0 ms (12.6 GB/s), GPU 0.3 ms; other shapes by "
            "their bytes. RTX 4090: 1,008 GB/s, 24 GB, 165 TFLOPS at half (data sheet). CPU 1,500 "
            "GFLOPS bf16 (Zen 4, AVX-512 bf16, a fifth of peak), overheads and slowdowns (four "
            "channels, 1.10) assumed."
        ),
        cpu="AMD Threadripper 7960X, 24 cores",
        gpu="NVIDIA RTX 4090",
        cpu_threads=24,
        gpu_memory_gib=24,
        host_memory_gib=128,
        bits_per_weight=16.0,
        link_gigabytes_per_second=12.583,
        cpu_gigabytes_per_second=48.3,
        cpu_gflops=1_500.0,
        cpu_expert_overhead_seconds=10e-6,
        cpu_first_expert_seconds=30e-6,
        gpu_gigabytes_per_second=1_008.0,
        gpu_gflops=82_000.0,
        gpu_expert_overhead_seconds=15e-6,
        dense_overhead_seconds=60e-6,
        cpu_slowdown_while_copying=1.10,
        link_slowdown_while_computing=1.10,
    ),
    Machine(
        name="desktop-12gb",
        source=(
            "Link 25.1 GB/s (papers.md 3.3, 4090 machine: PCIe 4.0 x16), host 53.8 GB/s (papers.md "
            "3.3, desktop). RTX 4070: 504 GB/s, 12 GB, 29 TFLOPS fp16 at half of the tensor peak "
            "(data sheet). CPU 800 GFLOPS int8 (8 cores, AVX2 VNNI), overheads and slowdowns (two "
            "channels, 1.15) assumed."
        ),
        cpu="8-core desktop, dual-channel DDR5",
        gpu="NVIDIA RTX 4070 12 GB",
        cpu_threads=8,
        gpu_memory_gib=12,
        host_memory_gib=64,
        bits_per_weight=4.5,
        link_gigabytes_per_second=25.1,
        cpu_gigabytes_per_second=53.8,
        cpu_gflops=800.0,
        cpu_expert_overhead_seconds=4e-6,
        cpu_first_expert_seconds=15e-6,
        gpu_gigabytes_per_second=504.0,
        gpu_gflops=29_000.0,
        gpu_expert_overhead_seconds=10e-6,
        dense_overhead_seconds=50e-6,
        cpu_slowdown_while_copying=1.15,
        link_slowdown_while_computing=1.15,
        host=HOST_COSTS,
    ),
    Machine(
        name="laptop-8gb",
        source=(
            "Link 11.8 and host 47.5 GB/s (papers.md 3.3, RTX 4060 laptop). RTX 4060 laptop: 256 "
            "GB/s, 8 GB, 15 TFLOPS fp16 at half of the tensor peak (data sheet). CPU 500 GFLOPS "
            "int8, overheads and slowdowns (two channels, 1.15) assumed."
        ),
        cpu="8-core laptop, dual-channel DDR5",
        gpu="NVIDIA RTX 4060 laptop 8 GB",
        cpu_threads=8,
        gpu_memory_gib=8,
        host_memory_gib=32,
        bits_per_weight=4.5,
        link_gigabytes_per_second=11.8,
        cpu_gigabytes_per_second=47.5,
        cpu_gflops=500.0,
        cpu_expert_overhead_seconds=4e-6,
        cpu_first_expert_seconds=15e-6,
        gpu_gigabytes_per_second=256.0,
        gpu_gflops=15_000.0,
        gpu_expert_overhead_seconds=12e-6,
        dense_overhead_seconds=60e-6,
        cpu_slowdown_while_copying=1.15,
        link_slowdown_while_computing=1.15,
        host=HOST_COSTS,
    ),
    Machine(
        name="ddr4-12gb",
        source=(
            "Link 12.0 GB/s (PCIe 3.0 x16, as fast as the PCIe 4.0 x8 of papers.md 3.3, 11.8), "
            "host 40 GB/s (DDR4-3200, two channels: 51.2 GB/s on paper, at the share of papers.md "
            "3.3's desktops). RTX 3060: 360 GB/s, 12 GB, 12.7 TFLOPS fp16 at half of the tensor "
            "peak (data sheet). CPU 400 GFLOPS int8 (6 cores, AVX2 without VNNI), overheads and "
            "slowdowns (two channels, 1.15) assumed."
        ),
        cpu="6-core desktop, dual-channel DDR4",
        gpu="NVIDIA RTX 3060 12 GB",
        cpu_threads=6,
        gpu_memory_gib=12,
        host_memory_gib=32,
        bits_per_weight=4.5,
        link_gigabytes_per_second=12.0,
        cpu_gigabytes_per_second=40.0,
        cpu_gflops=400.0,
        cpu_expert_overhead_seconds=4e-6,
        cpu_first_expert_seconds=15e-6,
        gpu_gigabytes_per_second=360.0,
        gpu_gflops=12_700.0,
        gpu_expert_overhead_seconds=12e-6,
        dense_overhead_seconds=60e-6,
        cpu_slowdown_while_copying=1.15,
        link_slowdown_while_computing=1.15,
        host=HOST_COSTS,
    ),
    Machine(
        name="desktop-16gb",
        source=(
            "Link 49.0 and host 53.8 GB/s (papers.md 3.3, 5090 desktop: PCIe 5.0 x16). RTX 5070 "
            "Ti: 896 GB/s, 16 GB, 44 TFLOPS fp16 at half of the tensor peak (data sheet). CPU 800 "
            "GFLOPS int8 (8 cores, AVX2 VNNI) and overheads assumed; slowdowns 1.2: of DDR5-6000's "
            "96 GB/s about 85 for the two together, assumed."
        ),
        cpu="8-core desktop, dual-channel DDR5",
        gpu="NVIDIA RTX 5070 Ti 16 GB",
        cpu_threads=8,
        gpu_memory_gib=16,
        host_memory_gib=64,
        bits_per_weight=4.5,
        link_gigabytes_per_second=49.0,
        cpu_gigabytes_per_second=53.8,
        cpu_gflops=800.0,
        cpu_expert_overhead_seconds=4e-6,
        cpu_first_expert_seconds=15e-6,
        gpu_gigabytes_per_second=896.0,
        gpu_gflops=44_000.0,
        gpu_expert_overhead_seconds=10e-6,
        dense_overhead_seconds=50e-6,
        cpu_slowdown_while_copying=1.2,
        link_slowdown_while_computing=1.2,
        host=HOST_COSTS,
    ),
    Machine(
        name="desktop-24gb",
        source=(
            "Link 25.1 and host 63.2 GB/s (papers.md 3.3, 4090 machine: PCIe 4.0 x16). RTX 4090: "
            "1,008 GB/s, 24 GB, 82 TFLOPS fp16 at half of the tensor peak (data sheet). CPU 800 "
            "GFLOPS int8 (8 cores, AVX2 VNNI), overheads and slowdowns (two channels, 1.15) "
            "assumed."
        ),
        cpu="8-core desktop, dual-channel DDR5",
        gpu="NVIDIA RTX 4090 24 GB",
        cpu_threads=8,
        gpu_memory_gib=24,
        host_memory_gib=64,
        bits_per_weight=4.5,
        link_gigabytes_per_second=25.1,
        cpu_gigabytes_per_second=63.2,
        cpu_gflops=800.0,
        cpu_expert_overhead_seconds=4e-6,
        cpu_first_expert_seconds=15e-6,
        gpu_gigabytes_per_second=1_008.0,
        gpu_gflops=82_000.0,
        gpu_expert_overhead_seconds=10e-6,
        dense_overhead_seconds=50e-6,
        cpu_slowdown_while_copying=1.15,
        link_slowdown_while_computing=1.15,
        host=HOST_COSTS,
    ),
)


def roofline(num_bytes: float, flops: float, gigabytes: float, gflops: float) -> float:
    """Return the seconds that memory or arithmetic needs, whichever is more."""
    return max(num_bytes / (gigabytes * 1e9), flops / (gflops * 1e9))


def cpu_seconds(machine: Machine, num_bytes: float, flops: float) -> float:
    """Return the seconds of one expert on the CPU; its first token hides behind the bytes."""
    by_memory = num_bytes / (machine.cpu_gigabytes_per_second * 1e9)
    return machine.cpu_expert_overhead_seconds + by_memory + flops / (machine.cpu_gflops * 1e9)


def shape_costs(machine: Machine, shape: Shape) -> ShapeCosts:
    """Return the times of one model shape on one machine."""
    expert_bytes = round(shape.expert_weights * machine.bits_per_weight / 8)
    dense_bytes = shape.dense_weights * DENSE_BYTES_PER_WEIGHT

    gpu_rate = (machine.gpu_gigabytes_per_second, machine.gpu_gflops)
    return ShapeCosts(
        shape=shape.name,
        num_moe_layers=shape.layers,
        num_experts=shape.experts,
        top_k=shape.top_k,
        expert_bytes=expert_bytes,
        tokens=TOKENS,
        cpu_seconds=tuple(
            round(cpu_seconds(machine, expert_bytes, 2 * shape.expert_weights * (n - 1)), 9)
            for n in TOKENS
        ),
        gpu_seconds=tuple(
            round(
                machine.gpu_expert_overhead_seconds
                + roofline(expert_bytes, 2 * shape.expert_weights * n, *gpu_rate),
                9,
            )
            for n in TOKENS
        ),
        dense_seconds=tuple(
            round(
                machine.dense_overhead_seconds
                + roofline(dense_bytes, 2 * shape.dense_weights * n, *gpu_rate),
                9,
            )
            for n in TOKENS
        ),
        cpu_first_expert_seconds=machine.cpu_first_expert_seconds,
        link_seconds_per_expert=round(expert_bytes / (machine.link_gigabytes_per_second * 1e9), 9),
    )


def profile(machine: Machine) -> HardwareProfile:
    """Return the profile of one machine for all shapes."""
    return HardwareProfile(
        name=machine.name,
        source=machine.source + (HOST_SOURCE if machine.host else ""),
        cpu=machine.cpu,
        gpu=machine.gpu,
        cpu_threads=machine.cpu_threads,
        gpu_memory_bytes=machine.gpu_memory_gib * 2**30,
        host_memory_bytes=machine.host_memory_gib * 2**30,
        link_bytes_per_second=machine.link_gigabytes_per_second * 1e9,
        cpu_slowdown_while_copying=machine.cpu_slowdown_while_copying,
        link_slowdown_while_computing=machine.link_slowdown_while_computing,
        shapes=tuple(shape_costs(machine, shape) for shape in SHAPES),
        host=machine.host,
    )


if __name__ == "__main__":
    PROFILES.mkdir(parents=True, exist_ok=True)
    for machine in MACHINES:
        path = PROFILES / f"{machine.name}.json"
        path.write_text(profile(machine).to_json())
        print(f"{path}")
