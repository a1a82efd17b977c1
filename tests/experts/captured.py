"""Captured steps on the CPU twin: a store, slots in host memory, random tokens."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.experts.cache.native_predictor import NativePredictor
from tandem.experts.cache.policy_tables import NATIVE_TABLES, native_step_policy
from tandem.experts.execution.routed_layers import native_layer
from tandem.experts.store.host_store import HostStore
from tandem.kernels import _native
from tandem.kernels.engine import best_isa, start_engine
from tandem.kernels.native import TOKEN_DTYPES
from tandem.policy.assignment import IN_GRAPH
from tandem.policy.cost import CostTable
from tandem.policy.plan import Geometry
from tandem.policy.planner import Planner
from tandem.policy.prediction.calibration import Counts
from tandem.policy.prediction.regression_predictor import RegressionPredictor
from tandem.policy.settings import PlannerSettings, make_planner
from tandem.policy.step_path import CAPTURE_SIZES
from tests.experts.machines import FUNCTIONS, GEOMETRY, HIDDEN, make_machine

PATIENCE = 20.0
SLOW_CPU = 5e-3  # seconds of an expert; fetched experts are waited for


class LayerTokens(NamedTuple):
    """One layer's inputs, and the place of its result."""

    hidden: Tensor  # (n_tokens, HIDDEN)
    chosen: Tensor  # (n_tokens, top_k)
    weights: Tensor
    out: Tensor  # as hidden


def native_layers(store: HostStore) -> list[_native.RoutedLayer]:
    """Return a store's layers in the coordinator's form; all of them must be packed."""
    native = [native_layer(layer, FUNCTIONS) for layer in store]
    layers = [layer for layer in native if layer is not None]
    assert len(layers) == len(native)
    return layers


def random_step(
    num_tokens: int,
    generator: torch.Generator,
    geometry: Geometry = GEOMETRY,
    dtype: torch.dtype = torch.float32,
    padding: float = 0.0,
) -> list[LayerTokens]:
    """Return random tokens for each layer; a share of their choices is padding."""
    found = []
    for _ in range(geometry.num_layers):
        scores = torch.rand(num_tokens, geometry.num_experts, generator=generator)
        weights, index = scores.topk(geometry.top_k)
        is_padding = torch.rand(index.shape, generator=generator) < padding
        hidden = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
        index = torch.where(is_padding, geometry.num_experts, index)
        found.append(LayerTokens(hidden, index, weights, torch.empty_like(hidden)))
    return found


def sure_of_predictions(planner: Planner) -> None:
    """Make a planner's predictions certain and frequent."""
    prediction = planner.prediction
    assert isinstance(prediction, RegressionPredictor | NativePredictor)
    state = prediction.state()

    def surely(counts: Counts) -> Counts:
        bins = len(state.counts.seen)
        sure = [seen * (0.2 + 0.05 * (place % bins)) for place, seen in enumerate(counts.seen)]
        return counts._replace(came_true=sure, countdown=3, count_every=3)

    prediction.restore(state._replace(counts=surely(state.counts), of_hints=surely(state.of_hints)))


def fetching_policy(rule: str, num_slots: int, cpu: float = SLOW_CPU) -> _native.StepPolicy:
    """Return a policy with a fast link and a slow CPU."""
    machine = make_machine(cpu=cpu, gpu=1e-5, link=2e-5)
    settings = PlannerSettings(assignment=rule, prefetch="none", never_worse_than_cpu=False)
    planner = make_planner(
        settings, GEOMETRY, CostTable(machine.shape), num_slots, tables=NATIVE_TABLES
    )
    policy = native_step_policy(planner)
    assert policy is not None
    policy.set_rule(IN_GRAPH.index(rule))
    return policy


def asking_policy(num_slots: int) -> _native.StepPolicy:
    """Return a policy that prefetches only what routers predict."""
    planner = asking_planner(num_slots)
    policy = native_step_policy(planner)
    assert policy is not None
    policy.set_rule(0, True, True)
    return policy


def asking_planner(num_slots: int) -> Planner:
    """Return the planner configuration of `asking_policy`."""
    machine = make_machine(cpu=1e-3, gpu=1e-5, link=2e-5)
    settings = PlannerSettings(
        assignment="ready-on-gpu", prediction="regression", prefetch_count=4,
        predicting_sizes=CAPTURE_SIZES, asking_sizes=CAPTURE_SIZES,
    )  # fmt: skip
    planner = make_planner(
        settings, GEOMETRY, CostTable(machine.shape), num_slots, tables=NATIVE_TABLES,
        copy_price_seconds=1e-5,
    )  # fmt: skip
    assert isinstance(planner.prediction, NativePredictor)
    state = planner.prediction.state()
    bins = len(state.counts.seen)
    hinted = [0.9 * seen * (place >= bins) for place, seen in enumerate(state.of_hints.seen)]
    planner.prediction.restore(
        state._replace(
            counts=state.counts._replace(came_true=[0.0] * bins),
            of_hints=state.of_hints._replace(came_true=hinted, countdown=1 << 30),
        )
    )
    return planner


def _counted(chosen: Tensor) -> tuple[list[int], list[int]]:
    """Return the chosen experts and each one's number of tokens."""
    experts, tokens = chosen.unique(return_counts=True)
    return experts.tolist(), tokens.tolist()


def right_guesses(step: Sequence[LayerTokens]) -> list[list[int]]:
    """Return, for each layer, the experts that the next layer will choose."""
    return [call.chosen.flatten().tolist() for call in step[1:]]


class TwinMachine:
    """A coordinator and a twin stream over a store's layers of one size."""

    def __init__(
        self,
        store: HostStore,
        size: int,
        *,
        num_slots: int = 0,
        geometry: Geometry = GEOMETRY,
        dtype: torch.dtype = torch.float32,
        num_threads: int = 1,
        most_delay: int = 0,
        policy: _native.StepPolicy | None = None,
        before_copy: Callable[[], None] | None = None,
        library: str | None = None,
    ) -> None:
        """Start the threads; `most_delay` is in microseconds.

        With a driver's `library` the device has its own table, updated before each step.
        """
        self.coordinator = _native.StepCoordinator(native_layers(store), num_threads, best_isa())
        box = self.coordinator.add_mailbox(size, geometry.top_k, TOKEN_DTYPES[dtype])
        self.table = torch.zeros(geometry.num_layers, geometry.num_experts, dtype=torch.int64)
        self.seen = self.table if library is None else self.table.clone()
        link = None if library is None else _native.DriverLink(library, self.seen.data_ptr())
        slot_bytes = max(layer.image_bytes for layer in store)
        self.slots = torch.zeros(max(1, num_slots), slot_bytes, dtype=torch.uint8)
        self.coordinator.manage_slots(
            self.table,
            [slot.data_ptr() for slot in self.slots[:num_slots]],
            slot_bytes,
            policy,
            0.0,
            before_copy,
            link,
        )
        self._policy = policy
        self.twin = _native.TwinStream(
            self.coordinator, box, self.seen, start_engine(num_threads=1), most_delay, 0
        )
        self.box = box

    def copy(self, layer: int, expert: int, slot: int, victim: int = -1) -> None:
        """Submit a copy between steps."""
        self.coordinator.submit([(layer, expert, slot, victim)])

    def start(
        self,
        step: Sequence[LayerTokens],
        rule: int | None = None,
        stops_before: int = -1,
        *,
        predicts: bool = False,
        asks: bool = False,
        is_known: bool = False,
    ) -> None:
        """Begin a step like a captured one: clear its entries before the launch.

        `rule` selects another rule by its number. With `is_known` the step's choices are announced.
        """
        self._step = step  # its tensors must live until the twin has ended
        self.coordinator.begin_step(self.box, PATIENCE)
        self.coordinator.clear_entries()
        if self.seen is not self.table:
            self.seen.copy_(self.table)
        if rule is not None:
            assert self._policy is not None
            self._policy.set_rule(rule, predicts, asks)
        if is_known:
            self.coordinator.expect(
                [(layer, *_counted(call.chosen)) for layer, call in enumerate(step)]
            )
        calls = [
            (layer, call.hidden, call.chosen, call.weights, call.out)
            for layer, call in enumerate(step)
        ]
        self.twin.start(calls, stops_before)

    def run(
        self,
        step: Sequence[LayerTokens],
        rule: int | None = None,
        patience: float = PATIENCE,
        *,
        predicts: bool = False,
        asks: bool = False,
        is_known: bool = False,
    ) -> None:
        """Run a whole step; raises `StepLostError`."""
        self.start(step, rule, predicts=predicts, asks=asks, is_known=is_known)
        try:
            self.coordinator.finish_step(patience)
        finally:
            self.twin.join()

    def close(self) -> None:
        """Stop the threads."""
        self.twin.join()
        self.coordinator.close()
