"""Decode steps that a coordinator answers: Python begins and ends them, native code does the rest.

    begin(ids)     planned copies have ended; entries of evicted experts are cleared
      -> layers    publish, hits, wait, combine: in a recorded or captured step, without Python;
                   after the wait a second launch, if some misses are fetched meanwhile
      -> finish    waits for the step's end, and takes the decisions that native code made in it
      -> report    planner and listeners get them: a step late, while the device runs the next step

A subclass defines what the layers run on: a GPU's graph, or on the emulated device the caller's
thread (docs/decisions/0016). Captured steps and planned steps (prompts) share one expert cache:
each kind of step takes over the experts that the other kind has copied.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.experts.cache.expert_cache import ExpertCache
from tandem.experts.cache.policy_tables import native_step_policy, resident_lists
from tandem.experts.execution.batch import ExpertFunctions
from tandem.experts.execution.device import DeviceLostError
from tandem.experts.execution.routed_layers import can_run_steps, native_layer
from tandem.experts.tracing.events import LayerExecuted, Listener
from tandem.kernels import _native
from tandem.kernels.dense import CpuThreads
from tandem.kernels.native import TOKEN_DTYPES
from tandem.policy.assignment import IN_GRAPH
from tandem.policy.eviction.next_use import NextUse
from tandem.policy.plan import Copy, LayerLoad, LayerPlan
from tandem.policy.residency import NOWHERE

PATIENCE_SECONDS = 10.0

_SlotCopy = tuple[int, int, int, int]  # (layer, expert, slot, evicted expert or -1)
_Record = tuple[int, list[int], list[int], list[float], int, float, float, float, float, list[int]]


# What was decided in a layer: the arguments of `CapturedSteps._apply`.
_Decided = tuple[
    int, float, Sequence[tuple[int, int, float]], Sequence[_SlotCopy], Sequence[_SlotCopy], int,
    Sequence[_SlotCopy],
]  # fmt: skip


class _Copies(NamedTuple):
    """The copies decided at one layer: into the cache, for one use, and for the next layer."""

    entered: tuple[Copy, ...] = ()
    staged: tuple[Copy, ...] = ()
    ahead: tuple[Copy, ...] = ()


class CapturedSteps:
    """Runs decode steps as captured steps on an expert cache; a subclass runs the layers."""

    def __init__(
        self,
        cache: ExpertCache,
        layers: Sequence[_native.RoutedLayer],
        threads: CpuThreads,
        table: NDArray[np.int64],
        *,
        bytes_per_second: float | None = None,
    ) -> None:
        """Start the coordinator, with as many computing threads as `threads`.

        `table` (layers, experts) in host memory will hold the address of each expert, 0: absent.
        The policy must have a native form (`policy_tables.native_step_policy`).
        """
        self._cache, self._rate, self._table = cache, bytes_per_second or 0.0, table
        self.coordinator = _native.StepCoordinator(layers, threads.num_threads, threads.isa)
        self._slots: object = None  # slots that the coordinator knows
        self._policy: _native.StepPolicy | None = None
        self._is_entered = False
        self._ring: list[int] = []  # slots into which the policy fetches
        self._changed: dict[int, int] = {}  # slot -> key of changes since the last planned step
        self._num_tokens = 0  # tokens of the step under way
        # What was decided in the last step; None: the planner knows it.
        self._decided: Sequence[_Decided] | None = None
        self._records: Sequence[_Record] = ()  # of the last step, for listeners
        self._copies: dict[int, _Copies] = {}  # of the last step, once the planner knows it

    @property
    def is_under_way(self) -> bool:
        """Tell whether a step has begun and not ended."""
        return self._num_tokens > 0

    def fetches(self, num_tokens: int) -> bool:
        """Tell whether a step of `num_tokens` tokens copies misses for use in the same layer."""
        return self._cache.planner.graph_rule(num_tokens).fetches

    def asks(self, num_tokens: int) -> bool:
        """Tell whether each layer of a step of `num_tokens` runs the next layer's router ahead."""
        return self._cache.planner.asks_in_graph(num_tokens)

    def link(self) -> _native.DriverLink | None:
        """Return the link that copies experts to the GPU; None if the slots are in host memory."""
        return None

    def wait_for_device(self) -> None:
        """Wait until all work on the device that reads slots has ended."""

    def begin_on(self, box: int, num_tokens: int, known: Sequence[LayerLoad] = ()) -> None:
        """Begin a step of `num_tokens` tokens in the coordinator's mailbox number `box`.

        Prefetches for the `known` loads start at once, because the device is not reading any slot
        yet.
        """
        if not self._may_tell_later(num_tokens):
            self._tell_planner()
        self._enter()
        self._lend_slots(num_tokens)
        self._cache.tell_host()
        self.coordinator.begin_step(box, PATIENCE_SECONDS)
        # The coordinator's thread has left the last step and waits for a doorbell.
        self.coordinator.clear_entries()
        self._choose_rule(num_tokens)
        if known:
            self.coordinator.expect([(load.layer, load.experts, load.tokens) for load in known])
        self._num_tokens = num_tokens

    def finish(self, *, has_listeners: bool) -> None:
        """End a step whose layers have all been run or queued.

        With `has_listeners`, the step is stored for `report`, which is a separate call, because
        reporting takes Python time, during which the next step can run.
        """
        assert self._num_tokens
        self._tell_planner()
        self.coordinator.finish_step(PATIENCE_SECONDS)
        num_tokens, self._num_tokens = self._num_tokens, 0
        self._decided = self.coordinator.take_decided()
        self._eviction.noted_natively(num_tokens)
        if error := self.coordinator.copy_error():
            raise RuntimeError(f"the link has stopped: {error}")
        self._records = self.coordinator.records() if has_listeners else ()

    def report(self, listeners: Sequence[Listener]) -> None:
        """Tell planner and listeners about the step that has finished; each step only once."""
        self._tell_planner()
        records, self._records = self._records, ()
        before = self._copies.get(-1, _Copies()).ahead
        for record in records:
            ahead, before = before, ()
            event = self._event(record, self._copies.get(record[0], _Copies()), ahead)
            for listener in listeners:
                listener(event)

    def abort(self) -> None:
        """Abandon the step under way, if any; the device must no longer be waiting in it.

        Decisions already made in the step stay valid. Raises `DeviceLostError` if the answering
        thread does not return from the step.
        """
        if not self._num_tokens:
            return
        if not self.coordinator.abort_step(PATIENCE_SECONDS):
            raise DeviceLostError(
                "the answering thread did not return from a decode step; start the program again"
            )
        self._num_tokens = 0
        self._tell_planner()
        self._decided, self._records = self.coordinator.take_decided(), ()
        self._tell_planner()

    def leave(self) -> None:
        """Hand the cache over to planned steps: finish copies, record the slots' new contents."""
        self.abort()
        if not self._is_entered:
            return
        self._tell_planner()
        self.wait_for_device()
        self._is_entered = False
        self.coordinator.clear_entries()
        self.coordinator.begin_copies()  # no kernel reads a slot now
        self.coordinator.drain_copies()
        planner = self._cache.planner
        for layer, expert, seconds in self.coordinator.take_arrivals():
            planner.copy_finished(layer, expert, seconds)
        for slot, key in self._changed.items():
            self._cache.engine.slots.adopt(slot, key)
        self._changed.clear()

    def close(self) -> None:
        """End the threads."""
        self.coordinator.close()

    @property
    def _eviction(self) -> NextUse:
        eviction = self._cache.planner.eviction
        assert isinstance(eviction, NextUse)
        return eviction

    def _enter(self) -> None:
        if self._is_entered:
            return
        cache, slots = self._cache, self._cache.engine.slots
        self.wait_for_device()
        cache.engine.drain()
        cache.take_arrivals()
        planner = cache.planner
        if slots is not self._slots or self._policy is None:
            addresses = [slots.address(slot) for slot in range(slots.num_slots)]
            self._policy, self._slots = native_step_policy(planner), slots
            assert self._policy is not None
            self.coordinator.manage_slots(
                self._table, addresses, slots.slot_bytes, self._policy, self._rate, None,
                self.link(),
            )  # fmt: skip
        self._load_policy()
        slot_of = planner.residency.slot_of
        addresses = [slots.address(slot) if slot >= 0 else 0 for slot in slot_of]
        self._table[:] = np.reshape(addresses, self._table.shape)
        self._is_entered = True

    def _load_policy(self) -> None:
        """Copy the planner's state into the native policy."""
        assert self._policy is not None
        planner = self._cache.planner
        link, self._ring = planner.link, planner.ring.held_slots()
        self._policy.load(*resident_lists(planner), link.free_at, [*link.pending])

    def _choose_rule(self, num_tokens: int) -> None:
        assert self._policy is not None
        planner, settings = self._cache.planner, self._cache.settings
        rule_idx = IN_GRAPH.index(settings.rule(graph_tokens=num_tokens))
        asks = self.asks(num_tokens)
        self._policy.set_rule(rule_idx, planner.predicts_in_graph(num_tokens), asks)
        rule = planner.graph_rule(num_tokens)
        dense = rule.dense_seconds(planner.costs, num_tokens, asks=asks)
        self.coordinator.set_dense_seconds(dense)

    def _lend_slots(self, num_tokens: int) -> None:
        """Let the ring borrow the slots that this step's fetches may need.

        The ring gets as many slots as any layer of recent steps needed. Experts that leave these
        slots lose their entries in the device's table.
        """
        ring = self._cache.planner.ring
        left = ring.begin_step(in_graph=True, may_fetch=self.fetches(num_tokens))
        if left or ring.held_slots() != self._ring:
            self.coordinator.clear(left)
            self._load_policy()

    def _may_tell_later(self, num_tokens: int) -> bool:
        """Tell whether a step of `num_tokens` can begin before the planner knows the last one.

        Then it learns of the last step while the device runs this one. Not so if slots may be lent,
        or if host slots follow what the device holds.
        """
        lent, on_disk = self._cache.planner.residency.lent, self._cache.store.slots is not None
        return self._is_entered and not (lent or on_disk or self.fetches(num_tokens))

    def _tell_planner(self) -> None:
        """Tell the planner what was decided in the last step, unless it knows.

        Copies that began before the first layer have the layer -1. Prefetched experts that did not
        enter the cache are dropped with the step.
        """
        decided, self._decided = self._decided, None
        if decided is None:
            return
        self._copies = {at[0]: self._apply(*at) for at in decided}
        planner = self._cache.planner
        planner.residency.release_passed(planner.geometry.num_layers, ())

    def _apply(
        self,
        layer: int,
        now: float,
        arrivals: Sequence[tuple[int, int, float]],
        entered: Sequence[_SlotCopy],
        staged: Sequence[_SlotCopy],
        num_needed: int,
        ahead: Sequence[_SlotCopy],
    ) -> _Copies:
        """Tell the planner which copies have ended and what was decided in a layer.

        Returns the layer's copies. `num_needed` is the number of the ring's slots that the layer
        could have used. A prefetched expert keeps its slot when it enters the cache.
        """
        cache, planner = self._cache, self._cache.planner
        geometry, residency = cache.geometry, planner.residency
        for arrival in arrivals:
            planner.copy_finished(*arrival)
        for next_layer, expert, slot, _ in ahead:
            self._insert(geometry.key(next_layer, expert), slot, residency.staging)
        found, set_id = [], residency.set_of(layer)
        for _, expert, slot, victim in entered:
            key, left = geometry.key(layer, expert), NOWHERE
            if victim >= 0:
                residency.remove(left := geometry.key(layer, victim))
            if residency.slot_of[key] != NOWHERE:
                residency.adopt(key, set_id)
                continue
            self._insert(key, slot, set_id)
            found.append(residency.copy_of(key, slot, left))
        if found or num_needed:
            planner.ring.note_needed(num_needed)
        copies = _Copies(tuple(found), *(_without_victims(some) for some in (staged, ahead)))
        for copy in (*copies.staged, *copies.ahead, *found):
            planner.link.issue(geometry.key(copy.layer, copy.expert), now)
        return copies

    def _insert(self, key: int, slot: int, set_id: int) -> None:
        own_slot = self._cache.planner.residency.insert(key, set_id)
        assert own_slot == slot, f"the planner gives slot {own_slot}, the coordinator {slot}"
        self._changed[slot] = key

    def _event(
        self,
        record: _Record,
        copies: _Copies,
        step_copies: tuple[Copy, ...],
    ) -> LayerExecuted:
        """Return the event that reports a layer to listeners, from its native record."""
        layer, choice, is_hit, _, _, rung, begun, ended, answered, in_time = record
        host, top_k = self._cache.store[layer], self._cache.geometry.top_k
        missed = {e for e, hit in zip(choice, is_hit, strict=True) if not hit}
        experts = sorted({e for e in choice if 0 <= e < host.arrivals.num_experts})
        tokens = tuple(choice.count(expert) for expert in experts)
        by_token = [choice[at : at + top_k] for at in range(0, len(choice), top_k)]
        routes = [row for row in by_token if min(row) >= 0]
        on_gpu = tuple(e for e in experts if e not in missed)
        on_cpu = tuple(e for e in experts if e in missed and e not in in_time)
        fetch = tuple(c for c in (*copies.entered, *copies.staged) if c.expert in in_time)
        insert = tuple(c for c in copies.entered if c.expert not in in_time)
        seconds = 0.0, ended - begun
        plan = LayerPlan(
            layer, on_gpu, (), fetch, on_cpu, insert, copies.ahead, *seconds, len(on_gpu)
        )
        return LayerExecuted(
            layer=layer,
            num_tokens=len(routes),
            num_active_experts=len(experts),
            num_expert_rows=sum(tokens),
            touched_bytes=len(experts) * host.image_bytes,
            load=LayerLoad(layer, tuple(experts), tokens, (), routes),
            plan=plan,
            step_copies=step_copies,
            begin_seconds=rung,
            end_seconds=answered,
        )


def _without_victims(copies: Sequence[_SlotCopy]) -> tuple[Copy, ...]:
    return tuple(Copy(layer, expert, slot, None) for layer, expert, slot, _ in copies)


def captured_layers(
    cache: ExpertCache, functions: Mapping[int, ExpertFunctions], dtype: torch.dtype
) -> list[_native.RoutedLayer] | None:
    """Return all layers of the store in native form, for captured steps.

    `functions` has the functions of each layer. Returns None if the kernels do not support a layer
    or `dtype`, or if the policy has no native form.
    """
    layers = [
        native
        for host in cache.store
        if can_run_steps(host, functions[host.layer])
        and (native := native_layer(host, functions[host.layer])) is not None
    ]
    if len(layers) < len(cache.store) or dtype not in TOKEN_DTYPES:
        return None
    return None if native_step_policy(cache.planner) is None else layers
