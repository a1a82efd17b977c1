"""The cost of a decode step beside its arithmetic: python -m benchmarks.generation.step_overhead

Qwen3-MoE with all its layers and a tiny width, so that only overhead is left: by the model's own
Python code, and replayed; also the time of recording a step.
"""

import argparse
import statistics
import time

from tandem.bench.model_shapes import ModelShape, find_shape
from tandem.bench.random_model import build_random_model
from tandem.decode.cpu_slots import CpuSlotPool
from tandem.hf.config import OffloadConfig
from tandem.hf.runtime import require_runtime

TINY = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": 16, "moe_intermediate_size": 32, "vocab_size": 1000,
}  # fmt: skip
WARM_UP_STEPS = 6  # recorded and compared in these
STEPS = 40


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    values = find_shape("qwen3-30b-a3b").values | TINY
    offload = OffloadConfig(expert_dtype="int4", threads=options.threads)
    model = build_random_model(
        ModelShape("qwen3_moe", values), offload, num_layers=options.layers,
        dense_dtype="int8-g32",
    )  # fmt: skip
    threads = require_runtime(model).threads
    prompts = {slot: [1 + slot, 2, 3] for slot in range(options.batch)}
    for has_replay in (False, True):
        pool = CpuSlotPool(model, threads, options.batch, capacity=3 + STEPS, has_replay=has_replay)
        pool.prefill(prompts)
        first: list[float] = []
        later: list[float] = []
        for step in range(WARM_UP_STEPS + STEPS):
            start = time.perf_counter()
            pool.decode(dict.fromkeys(prompts, 10 + step % 50))
            seconds = time.perf_counter() - start
            (first if step < WARM_UP_STEPS else later).append(seconds)
        step_ms = statistics.median(later) * 1e3
        how = "replayed" if pool.step.is_replaying else "from the model's code"
        print(
            f"{options.layers} layers, batch {options.batch}, {how}: {step_ms:.1f} ms a step "
            f"(the first {WARM_UP_STEPS}: {sum(first):.2f} s, the longest {max(first):.2f} s)"
        )


if __name__ == "__main__":
    main()
