"""The steps of a pool of slots on a GPU: one per size and form, captured where that saves time.

A step has 1, 2, 4, 8... tokens, so that few sizes are captured; the tokens' slots are an input.
Padding tokens fill a step up to its size: they choose no experts, and they write after a slot's
contents. A short prompt is also computed as a step, whose tokens are all of one slot.
"""

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from tandem.decode.cuda.fusion import fuse_for_gpu
from tandem.decode.cuda.graphs import (
    TOLERANCES,
    Announced,
    GraphLayers,
    new_graphed_step,
    recorded_for_capture,
)
from tandem.decode.cuda.handed_graph import handed_graph
from tandem.decode.cuda.resident_layers import GraphedLayers, graphed_layers
from tandem.decode.cuda.step_inputs import StepInputs
from tandem.decode.model_runner import ModelRunner, tolerance_of
from tandem.devices.cuda.captures import Capture
from tandem.devices.cuda.embedding import given_rows
from tandem.experts.execution.executor import Executor
from tandem.kernels.opaque_calls import intercepted
from tandem.kv_cache.cuda.cache import StaticKvCache
from tandem.recording.replay import ReplayedStep

MakeCapture = Callable[[], Capture]

# A prompt of at most so many tokens may be captured: its graph keeps what it computes, and longer
# ones keep a GPU busy while the host queues the model's own code.
MOST_PROMPT_TOKENS = 512
_LEAST_PROMPT_TOKENS = 16
# To capture a prompt takes as long as two or three of them; so many of a size come first, at least.
_PLAIN_PROMPTS = 1


class Step(NamedTuple):
    """A step of one size and one form of the KV cache (`StaticKvCache.form`)."""

    replayed: ReplayedStep
    resident: list[GraphedLayers]
    """Empty, or the one object that computes resident layers inside the captured step."""


class Steps:
    """The steps of a model on a KV cache, by size and form."""

    def __init__(
        self,
        runner: ModelRunner,
        cache: StaticKvCache,
        *,
        records: bool,
        make_capture: MakeCapture | None,
        make_room: Callable[[], bool],
        layers: GraphLayers | None = None,
    ) -> None:
        """Capture nothing yet; without `make_capture`, no step is ever captured.

        With `records`, a step is recorded first and captured in fewer operations than the model's
        own code has. `make_room` frees memory and returns whether it could. If `layers` is given,
        it computes the experts instead of the `GraphLayers` that suit the executor.
        """
        self._model, self._cache = runner, cache
        self._device = runner.model.device
        self._records, self._make_capture = records, make_capture
        self._make_room, self._layers = make_room, layers
        self._steps: dict[tuple[Any, ...], Step] = {}
        self._inputs: dict[int, StepInputs] = {}  # by size
        self._num_prompts: dict[int, int] = {}  # by size
        self._captures_prompts = True
        self._generation = 0
        self._captured_for: tuple[Any, ...] = ()
        self._embeddings = runner.model.get_input_embeddings()

    @property
    def _executor(self) -> Executor | None:
        return self._model.executor

    @property
    def by_size(self) -> Mapping[tuple[Any, ...], Step]:
        """The steps by key: a step's size, whether it computes a prompt, and its form."""
        return self._steps

    def inputs_of(self, count: int) -> StepInputs:
        """Return the inputs of steps of `count` tokens: always the same tensors."""
        if count not in self._inputs:
            self._inputs[count] = StepInputs(
                self._embeddings, count, self._device, self._model.room_for_hidden
            )
        return self._inputs[count]

    def follow_executor(self) -> None:
        """Drop all steps if they were captured for another state of the experts.

        The state is another one if the executor or the expert slots have been replaced, or if all
        experts were resident and now are not, or the reverse.
        """
        executor = self._executor
        if executor is not None:
            executor.settle()  # a replay of whole steps would never come to it
        cache = None if executor is None else executor.cache
        engine = None if cache is None else cache.engine
        now = (executor, engine, graphed_layers(executor) is not None)
        if len(self._captured_for) != len(now) or any(
            a is not b for a, b in zip(now, self._captured_for, strict=True)
        ):
            self._captured_for = now
            self._drop()

    def at(self, count: int, *, of_prompt: bool = False) -> Step:
        """Return the step of `count` tokens in the form that the KV cache currently requires."""
        if self._generation != self._cache.generation:
            self._generation = self._cache.generation
            self._drop()
        key = count, of_prompt, *self._cache.form
        if key not in self._steps:
            self._steps[key] = self._new_step(count, of_prompt=of_prompt)
        return self._steps[key]

    def run(self, step: Step) -> Tensor:
        """Run a step whose inputs are queued; return its logits."""
        if not step.replayed.is_replaying:
            return step.replayed()
        for layers in step.resident:
            layers.begin_step()
        logits = step.replayed()
        for layers in step.resident:
            layers.end_step()
        self.report(but=step)
        return logits

    def report(self, but: Step | None = None) -> None:
        """Report the resident layers of unreported replays, except the last replay of `but`."""
        for step in self._steps.values():
            for layers in step.resident:
                layers.report(but=int(step is but))

    def size_of_prompt(self, num_tokens: int) -> int | None:
        """Return the size of the step that computes a prompt; None: the model's own code does.

        The first prompt of a size always runs the model's own code. The call counts prompts, so it
        must be made once per prompt.
        """
        can = self._captures_prompts and self._make_capture is not None and self._records
        if not (can and _LEAST_PROMPT_TOKENS <= num_tokens <= MOST_PROMPT_TOKENS):
            return None
        if not (self._cache.takes_prompt_steps and self._model.keeps_logits):
            return None
        size = padded_size(num_tokens)
        if self.inputs_of(size).hidden is not None:
            return None
        self._num_prompts[size] = self._num_prompts.get(size, 0) + 1
        return size if self._num_prompts[size] > _PLAIN_PROMPTS else None

    def drop_prompts(self) -> bool:
        """Free captured prompts and never capture one again; return False if there were none."""
        prompts = [key for key in self._steps if key[1]]
        self._captures_prompts = False
        self.report()
        for key in prompts:
            del self._steps[key]
        return bool(prompts)

    def launch_once(self, count: int) -> None:
        """Run the operations of a captured step of `count` tokens; capture and keep nothing.

        This compiles and loads its kernels. Raises `NotRecordableError`, and errors of the kernels.
        """
        each = dict.fromkeys(range(count), 1)
        self._cache.begin_decode(each, count)
        self.inputs_of(count).upload([0] * count)
        with intercepted(Announced()):
            self.compute(count)  # makes what is made on first use
            if self._records:
                self._cache.begin_decode(each, count)
                self.recorded(count)()

    def compute(self, count: int, *, of_prompt: bool = False) -> Tensor:
        """Run a step of `count` tokens by the model's own code."""
        inputs, positions = self.inputs_of(count), self._cache.places(count).positions
        if of_prompt:
            rows = inputs.embedded
            with given_rows(None if rows is None else rows.transpose(0, 1)):
                ids = inputs.ids.view(1, count)
                return self._model.logits(ids, positions[None], inputs.last)[:, -1]
        with given_rows(inputs.embedded):
            logits = self._model.logits(inputs.ids, positions[:, None], 1)[:, -1]
        if inputs.hidden is not None and self._model.hidden is not None:
            inputs.hidden.copy_(self._model.hidden[:, -1])
        return logits

    def recorded(self, count: int, *, of_prompt: bool = False) -> Callable[[], Tensor]:
        """Record a step of `count` tokens; return a function that runs it in fewer operations."""
        places = self._cache.places(count)
        changing = [*self.inputs_of(count).tensors, places.slots, places.positions, places.runs]
        run = partial(self.compute, count, of_prompt=of_prompt)
        return recorded_for_capture(run, changing, fuse_for_gpu, partial(self._pad, count)).run

    def _pad(self, count: int, index: Tensor) -> Tensor:
        return index if count == 1 else index | self.inputs_of(count).idle  # one kernel

    def _drop(self) -> None:
        self.report()
        self._steps.clear()

    def _new_step(self, count: int, *, of_prompt: bool) -> Step:
        resident: list[GraphedLayers] = []
        executor = self._executor

        def find_layers() -> GraphLayers | None:
            if self._layers is not None:
                return self._layers
            layers = graphed_layers(executor)
            resident[:] = [] if layers is None else [layers]
            if layers is None:
                return handed_graph(executor, count)
            layers.prepare(count)
            return layers

        def announce_again() -> None:
            if of_prompt and executor is not None:
                executor.repeat_step(count)

        has_replay = self._make_capture is not None
        replayed = new_graphed_step(
            partial(self.compute, count, of_prompt=of_prompt),
            tolerance_of(self._model.model, TOLERANCES),
            self._make_capture or _no_capture,
            find_layers,
            pad=partial(self._pad, count),
            executor=executor,
            announce=announce_again,
            make_room=_nowhere if of_prompt else self._make_room,
            deferring=self._deferring,
            save=self._save,
            record_first=partial(self.recorded, count, of_prompt=of_prompt)
            if self._records
            else None,
            is_like_trusted=any(s.replayed.is_replaying for s in self._steps.values()),
            warns=not of_prompt,
            why_not=self._model.why_not_replayed(TOLERANCES, has_replay=has_replay),
        )
        return Step(replayed, resident)

    def _save(self) -> Callable[[], None]:
        return self._cache.states.save(self._cache.slots.tolist())

    def _deferring(self) -> contextlib.AbstractContextManager[None]:
        executor = self._executor
        return contextlib.nullcontext() if executor is None else executor.deferring()


def padded_size(num_tokens: int) -> int:
    """Return the size that a step of `num_tokens` is padded to: a power of two."""
    return 1 << (num_tokens - 1).bit_length()


def _nowhere() -> bool:
    return False


def _no_capture() -> Capture:
    raise AssertionError("a step that is not replayed is not captured")
