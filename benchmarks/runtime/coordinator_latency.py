"""What the host adds to a layer of a captured step.

python -m benchmarks.runtime.coordinator_latency

Qwen3-30B-A3B's sizes at batch 1, 25 % of the experts resident, on the CPU twin: from the device's
doorbell to the first miss at work, and from the last miss done to the device that goes on. The twin
runs beside the answering thread, so two idle cores are needed. Medians; the last line is JSON.
"""

import argparse
import json
import sys
from statistics import median

import torch
from benchmarks.runtime.overhead import (
    FUNCTIONS,
    QWEN_EXPERTS,
    QWEN_HIDDEN,
    QWEN_INTERMEDIATE,
    QWEN_TOP_K,
    make_store,
)

from tandem.experts.execution.routed_layers import native_layer
from tandem.kernels import _native
from tandem.kernels.engine import best_isa, start_engine
from tandem.kernels.native import TOKEN_DTYPES
from tandem.policy.plan import Geometry

PATIENCE = 20.0


def hand_offs(name: str, layers: int, steps: int, dense: float, share: float) -> dict[str, float]:
    """Return medians in microseconds by layer; `dense` is the twin's time between two layers."""
    geometry = Geometry(layers, QWEN_EXPERTS, QWEN_TOP_K)
    store = make_store(geometry, QWEN_HIDDEN, QWEN_INTERMEDIATE, name)
    native = [layer for host in store if (layer := native_layer(host, FUNCTIONS)) is not None]
    coordinator = _native.StepCoordinator(native, 1, best_isa())
    box = coordinator.add_mailbox(1, QWEN_TOP_K, TOKEN_DTYPES[torch.bfloat16])
    table = torch.zeros(layers, QWEN_EXPERTS, dtype=torch.int64)
    each = round(share * QWEN_EXPERTS)
    slots = torch.zeros(layers * each, store[0].image_bytes, dtype=torch.uint8)
    addresses = [slot.data_ptr() for slot in slots]
    coordinator.manage_slots(table, addresses, slots.shape[1], None, 0.0, None)
    coordinator.submit([(slot // each, slot % each, slot, -1) for slot in range(layers * each)])
    coordinator.drain_copies()
    twin = _native.TwinStream(coordinator, box, table, start_engine(num_threads=1), 0, 0)
    twin.set_dense_seconds(dense)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, QWEN_HIDDEN, generator=generator).bfloat16()
    weights, out = torch.full((1, QWEN_TOP_K), 1 / QWEN_TOP_K), torch.empty_like(hidden)
    before, after, computing = [], [], []
    for _ in range(steps):
        chosen = torch.stack(
            [torch.randperm(QWEN_EXPERTS, generator=generator)[:QWEN_TOP_K] for _ in range(layers)]
        )
        calls = [
            (layer, hidden, chosen[layer : layer + 1], weights, out) for layer in range(layers)
        ]
        coordinator.begin_step(box, PATIENCE)
        twin.start(calls, -1)
        coordinator.finish_step(PATIENCE)
        twin.join()
        for record, (rung, went_on) in zip(coordinator.records(), twin.times(), strict=True):
            _, begun, ended, _ = record[5:9]
            if record[4] and ended < went_on:
                before.append(begun - rung)
                computing.append(ended - begun)
                after.append(went_on - ended)
    coordinator.close()
    together = sorted([b + a for b, a in zip(before, after, strict=True)])
    found = {
        "doorbell_to_first_miss": median(before),
        "last_miss_to_done_seen": median(after),
        "together": median(together),
        "together_best_tenth": together[len(together) // 10],  # where others use the cores too
        "misses": median(computing),
    }
    return {name: seconds * 1e6 for name, seconds in found.items()}


def main() -> int:
    """Measure, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--share", type=float, default=0.25, help="of the experts resident")
    parser.add_argument("--dense", type=float, default=100.0, help="microseconds between layers")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    report = {}
    for name in ("int4", "int8"):
        found = hand_offs(name, flags.layers, flags.steps, flags.dense * 1e-6, flags.share)
        report[f"{name}, microseconds per layer"] = found
        print(f"{name}:", ", ".join(f"{key} {value:.1f}" for key, value in found.items()))
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
