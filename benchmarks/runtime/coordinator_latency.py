"""The host's time in each layer of a captured step.

python -m benchmarks.runtime.coordinator_latency

Qwen3-30B-A3B's sizes at batch 1, 25 % of the experts resident, on the CPU twin. Two times are
measured: from the device's doorbell to the start of the first miss, and from the end of the last
miss until the device continues. The twin runs beside the answering thread, so two idle cores are
needed. Medians; the last line is JSON.

With `--fetches` steps are decided by `balanced-in-graph` before the first miss, and only layers
whose fetched expert came in time count; the last event is then a miss or a copy. The copying thread
needs a third core.

With `--alone` nothing plays the device: all layers of a step are published before it begins, so
that on two cores the answering thread has one and the copying thread the other. This measures the
code, from the doorbell to the first miss and from the last miss or copy to the answer, without
threads that wait for each other's core.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

import torch
from benchmarks.runtime.overhead import (
    FUNCTIONS,
    QWEN_EXPERTS,
    QWEN_HIDDEN,
    QWEN_INTERMEDIATE,
    QWEN_TOP_K,
    make_store,
)

from tandem.experts.cache.policy_tables import NATIVE_TABLES, native_step_policy
from tandem.experts.execution.routed_layers import native_layer
from tandem.kernels import _native
from tandem.kernels.engine import best_isa, start_engine
from tandem.kernels.native import TOKEN_DTYPES
from tandem.policy.assignment import IN_GRAPH
from tandem.policy.cost import CostTable, ShapeCosts
from tandem.policy.plan import Geometry
from tandem.policy.planner import Planner
from tandem.policy.settings import FETCHING_RULE, PlannerSettings, make_planner

PATIENCE = 20.0
# Seconds of an expert for a fetching policy: it fetches one or two of six misses.
CPU_SECONDS, COPY_SECONDS = 3e-4, 5e-4
STAGING_SLOTS = 4  # that experts are fetched into for one use


class Layer(NamedTuple):
    """One layer of one step, as coordinator and twin saw it; seconds of one clock."""

    before: float
    computing: float
    after: float


class Hands:
    """A coordinator and a twin over layers of Qwen3-30B-A3B's sizes."""

    def __init__(
        self, name: str, layers: int, dense: float, share: float, *, fetches: bool, alone: bool
    ) -> None:
        """Copy a share of the experts; `dense` is the twin's time between two layers."""
        self._alone = alone
        self._layout = _native.MailboxLayout(
            layers, 1, QWEN_TOP_K, QWEN_HIDDEN, TOKEN_DTYPES[torch.bfloat16]
        )
        self._mailbox = memory_in_lines(self._layout.num_bytes)
        self.geometry = Geometry(layers, QWEN_EXPERTS, QWEN_TOP_K)
        self._store = make_store(self.geometry, QWEN_HIDDEN, QWEN_INTERMEDIATE, name)
        native = [native_layer(host, FUNCTIONS) for host in self._store]
        planner = planner_of(self.geometry, share)
        self._policy = native_step_policy(planner) if fetches else None
        if self._policy is not None:
            self._policy.set_rule(IN_GRAPH.index(FETCHING_RULE))
        self.coordinator = _native.StepCoordinator([one for one in native if one], 1, best_isa())
        box = self.coordinator.add_mailbox(
            1, QWEN_TOP_K, TOKEN_DTYPES[torch.bfloat16], self._mailbox
        )
        self._table = torch.zeros(layers, QWEN_EXPERTS, dtype=torch.int64)
        self._slots = torch.zeros(
            planner.residency.num_slots + 1, self._store[0].image_bytes, dtype=torch.uint8
        )
        addresses = [slot.data_ptr() for slot in self._slots]
        self.coordinator.manage_slots(
            self._table, addresses, self._slots.shape[1], self._policy, 0.0, None
        )
        held = [key for key, slot in enumerate(planner.residency.slot_of) if slot >= 0]
        slot_of = planner.residency.slot_of
        self.coordinator.submit([(*self.geometry.expert_id(key), slot_of[key], -1) for key in held])
        self.coordinator.drain_copies()
        self.coordinator.take_arrivals()  # the policy knows them as ready
        self._box, self._fetches = box, fetches
        self._twin = _native.TwinStream(
            self.coordinator, box, self._table, start_engine(num_threads=1), 0, 0
        )
        self._twin.set_dense_seconds(dense)
        self._generator = torch.Generator().manual_seed(0)

    def step(self) -> Iterator[Layer]:
        """Run a step; yield its layers whose last miss was not waited for otherwise."""
        layers, generator = self.geometry.num_layers, self._generator
        hidden = torch.randn(1, QWEN_HIDDEN, generator=generator).bfloat16()
        weights, out = torch.full((1, QWEN_TOP_K), 1 / QWEN_TOP_K), torch.empty_like(hidden)
        chosen = torch.stack(
            [torch.randperm(QWEN_EXPERTS, generator=generator)[:QWEN_TOP_K] for _ in range(layers)]
        )
        if self._alone:
            self._publish(hidden, chosen, weights)
        self.coordinator.begin_step(self._box, PATIENCE)
        self.coordinator.clear_entries()
        if not self._alone:
            self._twin.start(
                [(at, hidden, chosen[at : at + 1], weights, out) for at in range(layers)], -1
            )
        self.coordinator.finish_step(PATIENCE)
        self._twin.join()
        self.coordinator.drain_copies()
        landed = {arrival[:2]: arrival[2] for arrival in self._arrivals()}
        for record, (rung, went_on) in zip(
            self.coordinator.records(), self._twin.times(), strict=True
        ):
            (layer, *_), computed, fetched = record, record[4], record[9]
            seen, begun, ended, answered = record[5:9]
            if self._alone:
                rung, went_on = seen, answered
            last = max([ended, *(landed[layer, expert] for expert in fetched)])
            if computed and last < went_on and bool(fetched) == self._fetches:
                yield Layer(begun - rung, ended - begun, went_on - last)

    def _publish(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> None:
        """Publish all layers of a step, as a device would do one by one."""
        layout = self._layout
        self._mailbox[layout.hidden :][: hidden.nbytes] = hidden.view(torch.uint8).flatten()
        for at, experts in enumerate(chosen):
            first = at * layout.layer_bytes
            hits = self._table[at, experts] != 0
            for offset, values in (
                (layout.choice, experts.int()),
                (layout.is_hit, hits.int()),
                (layout.weights, weights[0]),
                (layout.done, torch.tensor([int(hits.all())], dtype=torch.int32)),
                (layout.doorbell, torch.ones(1, dtype=torch.int32)),
            ):
                self._mailbox[first + offset :][: values.nbytes] = values.view(torch.uint8)

    def _arrivals(self) -> list[tuple[int, int, float]]:
        """Return the step's copies, and report to the policy those that it has not received."""
        if self._policy is None:
            return []
        arrivals = [arrival for layer in self.coordinator.take_decided() for arrival in layer[2]]
        left = self.coordinator.take_arrivals()
        for arrival in left:
            self._policy.copy_finished(*arrival)
        return arrivals + left


def memory_in_lines(num_bytes: int) -> torch.Tensor:
    """Return zeros that begin at a line of the processor's cache."""
    memory = torch.zeros(num_bytes + 64, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 64 :][:num_bytes]


def planner_of(geometry: Geometry, share: float) -> Planner:
    """Return a planner with a full cache that fetches some misses."""
    costs = ShapeCosts(
        shape="hand-off", num_moe_layers=geometry.num_layers, num_experts=geometry.num_experts,
        top_k=geometry.top_k, expert_bytes=1, tokens=(1,), cpu_seconds=(CPU_SECONDS,),
        gpu_seconds=(1e-5,), dense_seconds=(1e-4,), cpu_first_expert_seconds=0.0,
        link_seconds_per_expert=COPY_SECONDS,
    )  # fmt: skip
    num_slots = round(share * geometry.num_layers * geometry.num_experts)
    settings = PlannerSettings(assignment=FETCHING_RULE)
    sizes = settings.set_sizes(geometry, num_slots)
    keys = [geometry.key(at, expert) for at, size in enumerate(sizes) for expert in range(size)]
    planner = make_planner(
        settings, geometry, CostTable(costs), num_slots, resident=keys, tables=NATIVE_TABLES
    )
    planner.ring.note_needed(STAGING_SLOTS)
    planner.ring.begin_step(in_graph=True)
    return planner


def hand_offs(
    name: str, layers: int, steps: int, dense: float, share: float, *, fetches: bool, alone: bool
) -> dict[str, float]:
    """Return medians in microseconds by layer; `dense` is the twin's time between two layers.

    Raises `ValueError` if no layer counts.
    """
    hands = Hands(name, layers, dense, share, fetches=fetches, alone=alone)
    found = [layer for _ in range(steps) for layer in hands.step()]
    hands.coordinator.close()
    if not found:
        raise ValueError(f"none of {steps} steps has a layer that counts; raise --steps")
    together = sorted([layer.before + layer.after for layer in found])
    medians = {
        "doorbell_to_first_miss": median([layer.before for layer in found]),
        "last_miss_to_done_seen": median([layer.after for layer in found]),
        "together": median(together),
        "together_best_tenth": together[len(together) // 10],  # where others use the cores too
        "misses": median([layer.computing for layer in found]),
    }
    return {name: seconds * 1e6 for name, seconds in medians.items()} | {"layers": len(found)}


def main() -> int:
    """Measure, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--share", type=float, default=0.25, help="of the experts resident")
    parser.add_argument("--dense", type=float, default=100.0, help="microseconds between layers")
    parser.add_argument("--fetches", action="store_true", help="of layers that fetch some misses")
    parser.add_argument("--alone", action="store_true", help="without a twin: the code by itself")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    report = {}
    for name in ("int4", "int8"):
        try:
            found = hand_offs(
                name, flags.layers, flags.steps, flags.dense * 1e-6, flags.share,
                fetches=flags.fetches, alone=flags.alone,
            )  # fmt: skip
        except ValueError as error:
            parser.error(str(error))
        report[f"{name}, microseconds per layer"] = found
        print(f"{name}:", ", ".join(f"{key} {value:.1f}" for key, value in found.items()))
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
