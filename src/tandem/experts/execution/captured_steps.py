"""Decode steps that a coordinator answers: Python begins and ends one, native code does the rest.

    begin(ids)     what was copied by plans has ended; entries of evicted experts are cleared
      -> layers    publish, hits, wait, combine: by `run`, or in a recorded step without Python
      -> finish    the planner and the listeners get what was decided behind the layers

On the emulated device the caller's thread is the device's stream (docs/decisions/0016). The expert
cache is one for both ways of computing: a planned step (a prompt) takes over what captured ones
have copied, and the other way round, at the border between them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.experts.cache.expert_cache import ExpertCache
from tandem.experts.cache.policy_tables import native_step_policy, resident_lists
from tandem.experts.execution.batch import ExpertFunctions, RoutedCall
from tandem.experts.execution.executor import DirectCall
from tandem.experts.execution.routed_layers import native_layer
from tandem.experts.tracing.events import LayerExecuted, Listener
from tandem.kernels import _native
from tandem.kernels.dense import VALUE_DTYPES, CpuThreads
from tandem.policy.eviction.next_use import NextUse
from tandem.policy.plan import Copy, LayerLoad, LayerPlan

NUM_ROWS = (1, 2, 4, 8)
PATIENCE_SECONDS = 10.0


class _Step(NamedTuple):
    """A step under way."""

    num_tokens: int
    twin: _native.TwinStream


class CapturedSteps:
    """The captured steps of an expert cache on the emulated device, for tokens of one dtype."""

    def __init__(
        self,
        cache: ExpertCache,
        layers: Sequence[_native.RoutedLayer],
        threads: CpuThreads,
        dtype: torch.dtype,
        *,
        bytes_per_second: float | None = None,
    ) -> None:
        """Start the coordinator's threads; hits are computed with `threads`.

        The policy must have a native form (`policy_tables.native_step_policy`).
        """
        self._cache, self._rate, self._dtype = cache, bytes_per_second or 0.0, dtype
        geometry = cache.geometry
        self.coordinator = _native.StepCoordinator(layers, threads.num_threads, threads.isa)
        # No tensor: a step that is being recorded must not see what is done here.
        self._table = np.zeros((geometry.num_layers, geometry.num_experts), dtype=np.int64)
        self._twins: dict[int, tuple[int, _native.TwinStream]] = {}
        for rows in NUM_ROWS:
            box = self.coordinator.add_mailbox(rows, geometry.top_k, dtype is torch.bfloat16)
            twin = _native.TwinStream(
                self.coordinator, box, self._table.ctypes.data, threads.engine, 0, 0
            )
            twin.set_patience(PATIENCE_SECONDS)
            self._twins[rows] = box, twin
        self._slots: object = None  # those that the coordinator knows
        self._policy: _native.StepPolicy | None = None
        self._is_entered = False
        self._changed: dict[int, int] = {}  # slot -> key, since the last planned step
        self._step: _Step | None = None

    @property
    def is_under_way(self) -> bool:
        """Tell whether a step has begun and not ended."""
        return self._step is not None

    def serves(self, call: RoutedCall) -> bool:
        """Tell whether native code reads a call's tensors as they are."""
        _, hidden, index, weights = call
        if hidden.dtype is not self._dtype or index.dtype is not torch.int64:
            return False
        return hidden.shape[0] <= NUM_ROWS[-1] and weights.dtype in VALUE_DTYPES

    def begin(self, num_tokens: int) -> None:
        """Begin a step of at most `NUM_ROWS[-1]` tokens."""
        self._enter()
        box, twin = self._twins[next(rows for rows in NUM_ROWS if rows >= num_tokens)]
        self.coordinator.clear_entries()
        self.coordinator.set_dense_seconds(self._cache.planner.costs.dense(num_tokens))
        self.coordinator.begin_step(box, PATIENCE_SECONDS)
        self._step = _Step(num_tokens, twin)

    def run(self, call: RoutedCall) -> Tensor:
        """Compute a layer of the step; raises `StepLostError` if it is not answered."""
        assert self._step is not None
        hidden, index, weights = [tensor.contiguous() for tensor in call.tensors]
        out = torch.empty_like(hidden)
        self._step.twin.run(_twin_call(call.layer, hidden, index, weights, out))
        return out

    def direct_call(
        self, call: RoutedCall, functions: ExpertFunctions, finish: Callable[[], None]
    ) -> DirectCall | None:
        """Return a layer of recorded steps, which end with `finish`; None: it is planned."""
        native = native_layer(self._cache.store[call.layer], functions)
        if native is None or not self.serves(call):
            return None
        is_last = call.layer == len(self._cache.store) - 1
        report = (lambda index, num_active: finish()) if is_last else None
        return DirectCall(native, None, report, partial(self._add_to, call.layer))

    def _add_to(
        self, layer: int, program: _native.Program, tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    ) -> None:
        """Add a layer (hidden, index, weights, out) to a program, which runs in begun steps."""
        rows = next(rows for rows in NUM_ROWS if rows >= len(tensors[0]))
        self._twins[rows][1].add_to(program, _twin_call(layer, *tensors))

    def finish(self, listeners: Sequence[Listener]) -> None:
        """End a step all of whose layers have run, and report it."""
        step, self._step = self._step, None
        assert step is not None
        self.coordinator.finish_step(PATIENCE_SECONDS)
        if error := self.coordinator.copy_error():
            raise RuntimeError(f"the link has stopped: {error}")
        decided = self.coordinator.take_decided()
        copies = [self._apply(*layer) for layer in decided]
        self._eviction.noted_natively(step.num_tokens)
        if not listeners:
            return
        for record, inserted in zip(self.coordinator.records(), copies, strict=True):
            event = self._event(record, inserted)
            for listener in listeners:
                listener(event)

    def abort(self) -> None:
        """Give up a step that has broken off."""
        if self._step is not None:
            self._step = None
            self.coordinator.abort_step()
            self._leave_policy()

    def leave(self) -> None:
        """Let plans take over: copies end, and the slots are known by what they hold."""
        self.abort()
        if not self._is_entered:
            return
        self._is_entered = False
        self.coordinator.clear_entries()
        self.coordinator.begin_copies()  # nothing reads any slot
        self.coordinator.drain_copies()
        planner = self._cache.planner
        for layer, expert, seconds in self.coordinator.take_arrivals():
            planner.copy_finished(layer, expert, seconds)
        for slot, key in self._changed.items():
            self._cache.engine.slots.adopt(slot, key)
        self._changed.clear()

    def forget(self) -> None:
        """Drop what is known of the slots: they are about to be others."""
        self.abort()
        self._is_entered = False
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
        cache.engine.drain()
        cache.take_arrivals()
        planner = cache.planner
        if slots is not self._slots or self._policy is None:
            addresses = [slots.address(slot) for slot in range(slots.num_slots)]
            self._policy, self._slots = native_step_policy(planner), slots
            assert self._policy is not None
            self.coordinator.manage_slots(
                self._table.ctypes.data, cache.geometry.num_experts, addresses, self._policy,
                self._rate, None,
            )  # fmt: skip
        self._policy.load(*resident_lists(planner), planner.link.free_at)
        slot_of = planner.residency.slot_of
        addresses = [slots.address(slot) if slot >= 0 else 0 for slot in slot_of]
        self._table[:] = np.reshape(addresses, self._table.shape)
        self._is_entered = True

    def _leave_policy(self) -> None:
        """Take over what was decided in a step that broke off."""
        for layer in self.coordinator.take_decided():
            self._apply(*layer)

    def _apply(
        self,
        layer: int,
        now: float,
        arrivals: Sequence[tuple[int, int, float]],
        copies: Sequence[tuple[int, int, int, int]],
    ) -> tuple[Copy, ...]:
        """Tell the planner what has ended and what was decided, in this order."""
        cache, planner = self._cache, self._cache.planner
        geometry, residency = cache.geometry, planner.residency
        for arrival in arrivals:
            planner.copy_finished(*arrival)
        found = []
        for _, expert, slot, victim in copies:
            evicts = None
            if victim >= 0:
                evicts = geometry.expert_id(geometry.key(layer, victim))
                residency.remove(geometry.key(layer, victim))
            key = geometry.key(layer, expert)
            given = residency.insert(key, residency.set_of(layer))
            assert given == slot, f"the planner gives slot {given}, the coordinator {slot}"
            self._changed[slot] = key
            found.append(Copy(layer, expert, slot, evicts))
        for copy in found:
            planner.link.issue(geometry.key(layer, copy.expert), now)
        return tuple(found)

    def _event(
        self,
        record: tuple[int, list[int], list[int], list[float], int, float, float, float, float],
        insert: tuple[Copy, ...],
    ) -> LayerExecuted:
        """Return what listeners hear of a layer."""
        layer, choice, is_hit, _, _, rung, begun, ended, answered = record
        host, top_k = self._cache.store[layer], self._cache.geometry.top_k
        missed = {e for e, hit in zip(choice, is_hit, strict=True) if not hit}
        experts = sorted({e for e in choice if 0 <= e < host.arrivals.num_experts})
        tokens = tuple(choice.count(expert) for expert in experts)
        rows = [choice[at : at + top_k] for at in range(0, len(choice), top_k)]
        routes = [row for row in rows if min(row) >= 0]
        on_gpu = tuple(e for e in experts if e not in missed)
        on_cpu = tuple(e for e in experts if e in missed)
        seconds = 0.0, ended - begun
        plan = LayerPlan(layer, on_gpu, (), (), on_cpu, insert, (), *seconds, len(on_gpu))
        return LayerExecuted(
            layer=layer,
            num_tokens=len(routes),
            num_active_experts=len(experts),
            num_expert_rows=sum(tokens),
            touched_bytes=len(experts) * host.image_bytes,
            load=LayerLoad(layer, tuple(experts), tokens, (), routes),
            plan=plan,
            begin_seconds=rung,
            end_seconds=answered,
        )


def _twin_call(
    layer: int, hidden: Tensor, index: Tensor, weights: Tensor, out: Tensor
) -> tuple[int, int, int, int, bool, int, int]:
    return (
        layer, len(hidden), hidden.data_ptr(), index.data_ptr(), weights.dtype is torch.bfloat16,
        weights.data_ptr(), out.data_ptr(),
    )  # fmt: skip
