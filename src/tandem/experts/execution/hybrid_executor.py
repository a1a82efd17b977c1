"""One MoE layer on two processors: the hybrid step.

    routing -> load -> plan -> { the CPU's share | hits on the device | copies on the link }
            -> routed tokens added in the router's order -> learn, report

`_execute_chunk` follows that order. The CPU's threads begin first because they end last; the
calling thread starts the device and the link and then computes with the CPU's threads. Work that
the layer's result does not need (`_learn_of_last_layer`) can wait until the caller has queued the
next layer. Under every plan the result has the same bits as `CpuExecutor`'s if the device's
arithmetic is the CPU's, which a GPU's is not (docs/runtime.md).
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.core.errors import ExecutionError
from tandem.experts.cache.expert_cache import SHRINK, ExpertCache
from tandem.experts.cache.sizing import OutOfDeviceMemoryError
from tandem.experts.execution.batch import CallSide, ExpertFunctions, RoutedCall
from tandem.experts.execution.captured_steps import CapturedSteps
from tandem.experts.execution.device import Device, DeviceLostError, WholeCache
from tandem.experts.execution.executor import Executor, computed_in_chunks
from tandem.experts.execution.expert_kernels import ExpertKernels
from tandem.experts.execution.launching import launch
from tandem.experts.execution.layer_call import LayerCall
from tandem.experts.execution.routing import Routing
from tandem.experts.store.host_store import HostLayer
from tandem.experts.tracing.events import LayerExecuted
from tandem.kernels import _native
from tandem.policy.plan import Copy, Hint, LayerLoad, LayerPlan
from tandem.policy.step_path import MAX_GRAPH_TOKENS


class _LayerStep(NamedTuple):
    """A call of a layer: its routing and its tensors on host and device."""

    host: HostLayer
    functions: ExpertFunctions
    routing: Routing
    hidden: Tensor  # (n_tokens, hidden_size), on the model's device
    tokens: Tensor  # the same, on the host
    weights: Tensor  # (n_tokens, top_k), on the model's device


class _Done(NamedTuple):
    """A computed layer that the planner has not learned from and no listener has heard of."""

    load: LayerLoad
    plan: LayerPlan
    begin: float
    plan_seconds: float
    step: _LayerStep


class HybridExecutor(Executor):
    """Computes layers by plans, in the model's layer order. Only `compute` is thread-safe."""

    cache: ExpertCache
    device: Device
    needs_steps = True

    def __init__(
        self, cache: ExpertCache, device: Device, kernels: ExpertKernels, *, in_graph: bool = False
    ) -> None:
        """Compute the store's experts on the cache's `device`, and the CPU's share with `kernels`.

        With `in_graph`, decode steps of few tokens follow the rules of steps in one graph.
        """
        super().__init__(cache.store)
        self.cache, self.device = cache, device
        self._in_graph = in_graph
        self.look_ahead: Callable[[int], Sequence[Hint]] | None = None
        """Called before a layer is planned; returns hints for the next layer. None: no hints."""
        self.captured: CapturedSteps | None = None
        """Runs decode steps of few tokens as captured steps, without plans; None: no such steps."""
        self._kernels = kernels
        self._turn = threading.Lock()
        self._announced: tuple[Sequence[int], bool] | None = None
        self._prompt: Sequence[int] | None = None  # the prompt announced last, if any
        self._known: Sequence[LayerLoad] = ()  # loads of the coming forward pass
        self._last_layer = len(self.store)
        self._requested_slots: int | None = None
        self._step_copies: tuple[Copy, ...] = ()
        self._done: _Done | None = None
        self._whole = device.resident(cache)
        self._is_deferring = False

    @property
    def in_graph(self) -> bool:
        """Whether decode steps of few tokens follow the rules of steps in one graph."""
        return self._in_graph or self.captured is not None

    @property
    def asks_ahead(self) -> bool:
        """Whether the executor runs each next layer's router ahead."""
        return self.look_ahead is not None

    def expect(self, known: Sequence[LayerLoad]) -> None:
        """Announce the known loads (of layers routed by token id) of the next forward pass."""
        self._known = known

    def take_known(self) -> Sequence[LayerLoad]:
        """Return the known loads that `expect` announced, and forget them."""
        known, self._known = self._known, ()
        return known

    def begin_step(self, token_ids: Sequence[int], *, is_prefill: bool) -> None:
        """Announce the tokens of the next forward pass; the ids are empty if unknown."""
        self._announced = token_ids, is_prefill
        self._prompt = token_ids if is_prefill else None

    def repeat_step(self, num_tokens: int) -> None:
        """Announce the last step again if it was a prompt; decode steps need no announcement."""
        if self._prompt is not None:
            self._announced = self._prompt, True

    @contextlib.contextmanager
    def captured_step(self, begin: Callable[[Sequence[LayerLoad]], None]) -> Iterator[None]:
        """Run a captured step: the caller must launch its graph inside the context.

        `begin` is called first, with the known loads of the step. Raises `StepSlowError` if the
        step waited too long for a disk; the step may then be repeated.
        """
        assert self.captured is not None
        with self._turn:
            self._announced, self._last_layer = None, len(self.store)
            self._learn_of_last_layer()
            self.captured.abort()
            with self._losing_at_most_a_step():
                begin(self.take_known())
                yield
                # Reports the previous step while the GPU computes this one.
                self.captured.report(self.listeners)
                self.captured.finish(has_listeners=bool(self.listeners))

    @contextlib.contextmanager
    def _losing_at_most_a_step(self) -> Iterator[None]:
        try:
            yield
        except (DeviceLostError, torch.OutOfMemoryError):
            raise
        except _native.StepSlowError:
            assert self.captured is not None
            self.captured.abort()
            raise
        except RuntimeError as error:
            self._recover(shrink=False)
            self.device.require_usable()
            raise ExecutionError(
                f"a decode step was lost ({error}); the request is lost, the model can be "
                "used again"
            ) from error
        except BaseException:  # Ctrl-C
            self._recover(shrink=False)
            raise

    def resize(self, num_slots: int) -> None:
        """Request that the cache has `num_slots` slots from the next step on."""
        self._requested_slots = num_slots

    def settle(self) -> None:
        """Let the planner learn from the layer executed last; apply a pending `resize`."""
        self._learn_of_last_layer()
        if self._requested_slots is not None:
            num_slots, self._requested_slots = self._requested_slots, None
            self.resize_now(num_slots)

    def resize_now(self, num_slots: int, resident: Sequence[int] | None = None) -> None:
        """Change the number of slots between steps, as `ExpertCache.resize` does.

        Captured steps rely on the slots' contents, so the executor leaves them first.
        """
        self.catch_up()
        if self.captured is not None:
            self.captured.leave()
        self.cache.resize(num_slots, resident)
        self._whole = self.device.resident(self.cache)

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Return a context that defers learning and reporting of a layer to the next layer's call.

        For the last layer, both happen when the context ends. Meanwhile the device computes queued
        work.
        """
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False
            with self._turn:
                self._learn_of_last_layer()

    def close(self) -> None:
        """End all threads and give the device's memory back."""
        with contextlib.suppress(RuntimeError):  # the device is lost
            self.catch_up()
        if self.captured is not None:
            self.captured.close()
        self.cache.close()

    def compute(self, call: RoutedCall, functions: ExpertFunctions) -> Tensor:
        """Compute a call; see `execute`. Calls from several Python threads are serialised."""
        call, layer = call.detached(), call.layer
        with self._turn:
            try:
                return self._compute(call, functions)
            except DeviceLostError:
                raise
            except Exception as error:
                self._recover(shrink=False)
                self.device.require_usable()
                raise ExecutionError(
                    f"MoE layer {layer} could not be computed ({error}); the request is lost, the "
                    "model can be used again"
                ) from error
            except BaseException:  # Ctrl-C is no error, but leaves the layer half done
                self._recover(shrink=False)
                raise

    def _compute(self, call: RoutedCall, functions: ExpertFunctions) -> Tensor:
        if call.layer <= self._last_layer or self._announced is not None:
            self._begin_step(call.hidden.shape[0])
        self._last_layer = call.layer
        return computed_in_chunks(call, lambda chunk: self._execute_chunk(chunk, functions))

    def _begin_step(self, num_tokens: int) -> None:
        self.catch_up()
        if self.captured is not None:
            self.captured.leave()
        self.settle()
        token_ids, is_prefill = self._announced or ((), False)
        self._announced = None
        cache = self.cache
        cache.tell_host()
        is_short = not is_prefill and num_tokens <= MAX_GRAPH_TOKENS
        ahead = cache.planner.begin_step(
            num_tokens, cache.clock.now, token_ids=token_ids, is_prefill=is_prefill,
            in_graph=self._in_graph and is_short, known=self.take_known(),
        )  # fmt: skip
        self._step_copies = ahead
        if ahead:
            cache.clock.issue(ahead)
            cache.submit(ahead, is_needed=cache.planner.prompt.is_on)

    def _execute_chunk(self, call: RoutedCall, functions: ExpertFunctions) -> Tensor:
        self._learn_of_last_layer()
        if self._whole is not None and self._whole.serves(functions):
            try:
                return self._execute_whole(self._whole, call, functions)
            except (OutOfDeviceMemoryError, torch.OutOfMemoryError):
                self._recover(shrink=True)
        layer, hidden, top_k_index, top_k_weights = call
        host, cache = self.store[layer], self.cache
        index, tokens = self.device.download(top_k_index, hidden)
        routing = Routing(index, host.arrivals.num_experts)
        clock = cache.clock
        clock.run_dense(hidden.shape[0])
        if not routing.experts:
            return torch.zeros_like(hidden)
        load = routing.load(layer, self._weights_to_read(top_k_weights))
        cache.take_arrivals()
        begin, plan_begin = clock.now, time.perf_counter()
        asks = self.look_ahead is not None and cache.planner.asks_after(layer)
        hints = self.look_ahead(layer) if self.look_ahead is not None and asks else ()
        slots = self.store.slots
        places = slots.places(layer, routing.experts) if slots is not None else b""
        plan = cache.planner.plan(load, begin, hints, places)
        plan_seconds = time.perf_counter() - plan_begin
        step = _LayerStep(host, functions, routing, hidden, tokens, top_k_weights)
        try:
            out = self._carry_out(step, plan)
        except (OutOfDeviceMemoryError, torch.OutOfMemoryError):
            self._recover(shrink=True)
            plan = plan.all_on_cpu(load)
            out = self._carry_out(step, plan)
        self._done = _Done(load, plan, begin, plan_seconds, step)
        if not self._is_deferring:
            self._learn_of_last_layer()
        return out

    def _execute_whole(
        self, whole: WholeCache, call: RoutedCall, functions: ExpertFunctions
    ) -> Tensor:
        """Queue a layer whose experts are all resident, without waiting for the router's choice."""
        layer, hidden, index, weights = call
        self.cache.clock.run_dense(hidden.shape[0])
        out = whole.execute(layer, hidden, index, weights, functions)
        if self.listeners:
            whole.note(layer, index)
        return out

    def catch_up(self) -> None:
        """Let the planner learn from the layer executed last; report all unreported layers.

        Without this call, the next step reports captured steps and layers computed without a plan.
        """
        self._learn_of_last_layer()
        if self.captured is not None:
            self.captured.report(self.listeners)
        if self._whole is not None:
            for event in self._whole.noted(self.cache.clock.now):
                for listener in self.listeners:
                    listener(event)

    def _learn_of_last_layer(self) -> None:
        if self._done is None:
            return
        done, self._done = self._done, None
        self.cache.planner.learn()
        self.cache.clock.run(done.load, done.plan)
        if self.listeners:
            self._report(done)

    def _weights_to_read(self, top_k_weights: Tensor) -> Tensor | None:
        """Return the gate weights, copied to the host; None if the eviction policy ignores them."""
        if not self.cache.planner.eviction.reads_weights:
            return None
        return self.device.download(top_k_weights)[0]

    def _carry_out(self, step: _LayerStep, plan: LayerPlan) -> Tensor:
        """Execute a plan on CPU, device and link; return the weighted sum of experts' results."""
        if plan.cpu:
            self._kernels.wake()
        call = LayerCall(step.host, step.functions, step.routing, plan.in_launch_order())
        num_routed, width = step.routing.num_routed, step.hidden.shape[1]
        num_on_device = len(plan.gpu) + len(plan.arriving) + len(plan.fetch)
        on_host = CallSide(step.tokens, self.device.host_rows(num_routed, width))
        share = started = None
        if plan.cpu:
            share = call.batch(num_on_device, num_on_device + len(plan.cpu), on_host)
            if self.device.runs_in_parallel:
                started = self._kernels.start(share)
        try:
            self.cache.cancel_unused(plan.layer, step.routing.experts)
            on_device = CallSide(step.hidden, self.device.rows(num_routed, width))
            launch(self.cache, self.device, call, plan, on_device)
            self.cache.submit(plan.insert, is_needed=False)
            self.cache.submit(plan.prefetch, is_needed=self.cache.planner.prompt.is_on)
            if num_on_device:
                result = call.prepare_result(on_device, step.weights, self.device.prepare_sum)
            else:
                result = self._prepare_result_of_host(call, step, on_host)
        finally:
            if started is not None:
                started.finish()
        if share is not None and started is None:
            self._kernels.run(share)
        if share is not None and num_on_device:
            first = call.first_row(num_on_device)
            self.device.upload(on_host.rows[first:], on_device.rows[first:])
        return result()

    def _prepare_result_of_host(
        self, call: LayerCall, step: _LayerStep, side: CallSide
    ) -> Callable[[], Tensor]:
        """Return a function that sums the rows on the host, where all are, and uploads the sum."""
        (weights,) = self.device.download(step.weights)
        result = call.prepare_result(side, weights, self._kernels.prepare_sum)
        return lambda: self._uploaded(result(), step)

    def _uploaded(self, result: Tensor, step: "_LayerStep") -> Tensor:
        """Return `result` in the memory that holds the model's state; uploads it if necessary."""
        if step.hidden.device == result.device:
            return result
        out = torch.empty_like(step.hidden)
        self.device.upload(result, out)
        return out

    def _recover(self, *, shrink: bool) -> None:
        """Return to a usable state after an error in a layer; with `shrink`, with fewer slots."""
        self.device.forget_rows()
        if self.captured is not None:
            self.captured.leave()
        slots = self.cache.num_slots
        with contextlib.suppress(Exception):  # on failure the cache stays empty
            self.cache.resize(int(slots * SHRINK) if shrink else slots)
        self._whole = self.device.resident(self.cache)
        self._last_layer = len(self.store)

    def _report(self, done: _Done) -> None:
        load, plan, begin, plan_seconds, step = done
        num_active, routing = len(load.experts), step.routing
        event = LayerExecuted(
            layer=load.layer, num_tokens=routing.num_tokens, num_active_experts=num_active,
            num_expert_rows=routing.num_routed, touched_bytes=num_active * step.host.image_bytes,
            load=load, plan=plan, step_copies=self._step_copies, begin_seconds=begin,
            end_seconds=self.cache.clock.now, plan_seconds=plan_seconds,
        )  # fmt: skip
        self._step_copies = ()
        for listener in self.listeners:
            listener(event)
