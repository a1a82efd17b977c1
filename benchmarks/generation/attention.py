"""The attention of one layer by depth, against the ceilings of its bytes and multiplications.

    python -m benchmarks.generation.attention [--shape qwen3-30b-a3b] [--kv-dtype bf16,int8]

Decode: one token on a cache of a number of positions, relative to reading it once. Prefill: 512
tokens up to a number of positions, relative to their multiplications at the peak. Each case is
measured between two measurements of the ceilings.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch

from tandem.bench.kernels import KernelBench
from tandem.bench.model_shapes import find_shape
from tandem.kernels.attention import AttentionForm, CachedAttention
from tandem.kernels.cpu import detect_cpu
from tandem.kernels.dense import CpuThreads

DEPTHS = (64, 512, 4096, 16384)
PROMPT = 512
SECONDS = 0.5
# Decode uses this many layers in turn, so that none is in a processor's cache.
COLD_BYTES = 256e6


def form_of(shape_name: str) -> AttentionForm:
    """Return the attention form of a released model."""
    values = find_shape(shape_name).values
    heads = values["num_attention_heads"]
    dim = values.get("head_dim") or values["hidden_size"] // heads
    if "qk_nope_head_dim" in values:  # latent attention, as the model expands it
        dim = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    return AttentionForm(
        num_heads=heads, num_kv_heads=values["num_key_value_heads"], key_dim=dim,
        value_dim=values.get("v_head_dim", dim), scale=dim**-0.5,
    )  # fmt: skip


def filled(form: AttentionForm, kv_dtype: str, depth: int, threads: CpuThreads) -> CachedAttention:
    """Return a cache of one slot with `depth` random positions."""
    attention = CachedAttention(form, kv_dtype)
    attention.reserve(1, depth)
    rows, positions = torch.zeros(depth, dtype=torch.int64), torch.arange(depth)
    key, value = (
        torch.randn(form.num_kv_heads, depth, dim).bfloat16()
        for dim in (form.key_dim, form.value_dim)
    )
    attention.append(threads, rows, positions, key, value)
    return attention


def attend_call(
    attentions: list[CachedAttention], threads: CpuThreads, first: int, count: int
) -> Callable[[], object]:
    """Return a function that attends for `count` tokens from position `first` on."""
    form = attentions[0].form
    rows, positions = torch.zeros(count, dtype=torch.int64), torch.arange(first, first + count)
    query = torch.randn(form.num_heads, count, form.key_dim).bfloat16()
    layers = itertools.cycle(attentions)
    return lambda: next(layers).attend(threads, rows, positions, query)


def median_seconds(call: Callable[[], object], least_calls: int) -> float:
    """Return the median of the calls in half a second, after one untimed call."""
    call()
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(times) < least_calls or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--kv-dtype", default="bf16,int8")
    parser.add_argument("--threads", type=int, default=detect_cpu().num_threads)
    parser.add_argument("--depth", type=int, nargs="+", default=DEPTHS)
    options = parser.parse_args()
    threads = CpuThreads(num_threads=options.threads)
    bench, form = KernelBench(num_threads=options.threads), form_of(options.shape)
    print(f"{detect_cpu().model_name}, {options.threads} threads, {threads.engine.isa}, {form}")
    for kv_dtype, depth in itertools.product(options.kv_dtype.split(","), options.depth):
        one = filled(form, kv_dtype, depth, threads)
        size = one.bytes_of(depth)
        count = max(1, min(48, int(COLD_BYTES / size)))
        layers = [one, *(filled(form, kv_dtype, depth, threads) for _ in range(count - 1))]
        before = bench.ceiling()
        decode = median_seconds(attend_call(layers, threads, depth - 1, 1), 10)
        ceiling = bench.ceiling()
        gbps = (before.read_gigabytes_per_second + ceiling.read_gigabytes_per_second) / 2
        bound = size / gbps / 1e9
        print(
            f"{kv_dtype} decode at {depth:6}: {decode * 1e3:7.3f} ms, {size / 1e6:6.1f} MB at "
            f"{gbps:.1f} GB/s take {bound * 1e3:.3f} ms: {bound / decode:4.0%}",
            flush=True,
        )
        if depth >= PROMPT:
            prefill = median_seconds(attend_call([one], threads, depth - PROMPT, PROMPT), 3)
            pairs = PROMPT * (depth - PROMPT) + PROMPT * (PROMPT + 1) / 2
            work = 2 * pairs * form.num_heads * (form.key_dim + form.value_dim)
            peak = (ceiling.int4_gops if kv_dtype == "int8" else ceiling.bf16_gflops) * 1e9
            print(
                f"{kv_dtype} prefill to {depth:6}: {prefill * 1e3:6.2f} ms, {work / 1e9:.1f} Gop "
                f"at {peak / 1e9:.0f} Gop/s take {work / peak * 1e3:.2f} ms: "
                f"{work / peak / prefill:4.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
