"""Splits a trace into steps: sequences side by side, each prompt at once, then token by token."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tandem.core.errors import ConfigError
from tandem.policy.plan import Hint, LayerLoad
from tandem.trace import RoutingTrace

Ints = npt.NDArray[np.int64]


class Step(NamedTuple):
    """Tokens of a trace that run together as one step."""

    tokens: Ints  # indices into the trace
    is_prefill: bool
    num_new: int  # those that the sequences keep; the others are rejected drafts


class Decoding(Protocol):
    """Chooses the tokens of decode steps."""

    def next(self, running: Sequence[tuple[int, int]]) -> tuple[Ints, list[int]]:
        """Return the tokens of the next step, and by how many tokens each sequence advances.

        Tokens are indices into the trace. `running` has, for each sequence, the indices of its next
        token and of its end.
        """

    def done(self) -> None:
        """Record that the step has ended."""


class OneEach:
    """Decodes one token of each sequence per step, without drafts."""

    def next(self, running: Sequence[tuple[int, int]]) -> tuple[Ints, list[int]]:
        """Return the next token of each sequence, and 1 as each sequence's advance."""
        return np.array([at for at, _ in running]), [1] * len(running)

    def done(self) -> None:
        """Do nothing."""


def replay_steps(
    trace: RoutingTrace, batch: int, prompt: int | None, decoding: Decoding | None = None
) -> Iterator[Step]:
    """Yield steps of `batch` sequences side by side; the first `prompt` tokens of each run at once.

    If `prompt` is None, prompts are as long as recorded (meta `prompt_tokens`). A sequence that
    ends gives its slot to the next sequence, whose prompt then runs as a step. When no sequence is
    left for a free slot, the replay ends, so that every decode step is a full batch. If a trace has
    fewer sequences than `batch`, its longest sequences are halved until there are enough.
    `decoding` chooses the tokens of a decode step; None: one token of each sequence.
    """
    decoding = decoding or OneEach()
    waiting = _spans(trace, batch)
    prompts = _prompts(trace, prompt)
    running_slots: list[tuple[int, int]] = []
    while True:
        running_slots = [(at, end) for at, end in running_slots if at < end]
        joining = [waiting.pop(0) for _ in range(min(batch - len(running_slots), len(waiting)))]
        if len(running_slots) + len(joining) < batch:
            return
        if joining and any(prompts[at] for at, _ in joining):
            split = [(at, min(at + prompts[at], end), end) for at, end in joining]
            tokens = np.concatenate([np.arange(at, mid) for at, mid, _ in split])
            yield Step(tokens, True, len(tokens))
            joining = [(mid, end) for _, mid, end in split]
        running_slots += joining
        running = [(at, end) for at, end in running_slots if at < end]
        if len(running) < batch:
            continue
        tokens, moved = decoding.next(running_slots)
        yield Step(tokens, False, sum(moved))
        decoding.done()
        running_slots = [
            (at + count, end) for (at, end), count in zip(running_slots, moved, strict=True)
        ]


def _prompts(trace: RoutingTrace, prompt: int | None) -> Mapping[int, int]:
    """Return, by the index of a sequence's first token, how many tokens run as its prompt."""
    if prompt is not None:
        return defaultdict(lambda: prompt)
    recorded = trace.meta.more.get("prompt_tokens")
    if not isinstance(recorded, list) or len(recorded) != trace.num_sequences:
        raise ConfigError("the trace has no prompt_tokens; expected a number as prompt")
    return dict(zip(trace.seq_offsets[:-1].tolist(), recorded, strict=True))


def _spans(trace: RoutingTrace, batch: int) -> list[tuple[int, int]]:
    offsets = trace.seq_offsets.tolist()
    spans = list(pairwise(offsets))
    if trace.num_tokens < batch:
        raise ConfigError(
            f"batch is {batch}; expected at most {trace.num_tokens}, the tokens of the trace"
        )
    while len(spans) < batch:
        at = max(range(len(spans)), key=lambda i: spans[i][1] - spans[i][0])
        start, end = spans[at]
        middle = (start + end) // 2
        spans[at : at + 1] = [(start, middle), (middle, end)]
    return spans


class LoadReader:
    """Converts steps to the loads of all layers, as routers would report them."""

    def __init__(self, trace: RoutingTrace) -> None:
        """Read from `trace`."""
        self._trace = trace
        self._geometry = trace.meta.geometry
        layers, experts = self._geometry.num_layers, self._geometry.num_experts
        self._first = (np.arange(layers) * experts)[None, :, None]
        self._ones = (1,) * self._geometry.top_k

    def loads(self, step: Step) -> list[LayerLoad]:
        """Return the step's loads, one per layer."""
        if len(step.tokens) == 1:
            return self._single(int(step.tokens[0]))
        chosen = self._trace.experts[step.tokens]  # (tokens, layers, top_k)
        keys = (chosen + self._first).ravel()
        size = self._geometry.num_layers * self._geometry.num_experts
        counts = np.bincount(keys, minlength=size)
        sums = None
        if self._trace.weights is not None:
            flat = self._trace.weights[step.tokens].astype(np.float64).ravel()
            sums = np.bincount(keys, weights=flat, minlength=size)
        routes = chosen.transpose(1, 0, 2).tolist()
        shape = (self._geometry.num_layers, self._geometry.num_experts)
        return [
            self._load(layer, row, None if sums is None else sums.reshape(shape)[layer], routes)
            for layer, row in enumerate(counts.reshape(shape))
        ]

    def known(self, loads: Sequence[LayerLoad]) -> list[LayerLoad]:
        """Return the known loads among a step's `loads`, which must have one load per layer."""
        return [loads[layer] for layer in self._trace.meta.by_token]

    def hints(self, step: Step) -> list[list[Hint]]:
        """Return by layer the hints that the trace recorded for it, one per predictor.

        Without predictors, each layer's list is empty.
        """
        layers = self._geometry.num_layers
        predicted, names = self._trace.predicted, self._trace.meta.predictors
        hints: list[list[Hint]] = [[] for _ in range(layers)]
        if predicted is None:
            return hints
        chosen = predicted[step.tokens]  # (tokens, layers, predictors, k)
        for place, name in enumerate(names):
            for layer in range(layers):
                experts, tokens = np.unique(chosen[:, layer, place], return_counts=True)
                load = LayerLoad(layer, tuple(experts.tolist()), tuple(tokens.tolist()))
                hints[layer].append(Hint(name, load))
        return hints

    def token_ids(self, step: Step) -> tuple[int, ...]:
        """Return the ids of the step's tokens; empty if the trace has none."""
        ids = self._trace.token_ids
        return () if ids is None else tuple(ids[step.tokens].tolist())

    def _single(self, token: int) -> list[LayerLoad]:
        rows = self._trace.experts[token].tolist()
        ones = self._ones
        if self._trace.weights is None:
            return [
                LayerLoad(layer, tuple(sorted(row)), ones, (), (row,))
                for layer, row in enumerate(rows)
            ]
        order = np.argsort(self._trace.experts[token], axis=-1)
        weights = np.take_along_axis(self._trace.weights[token], order, axis=-1).tolist()
        return [
            LayerLoad(layer, tuple(sorted(row)), ones, tuple(weights[layer]), (row,))
            for layer, row in enumerate(rows)
        ]

    def _load(
        self,
        layer: int,
        counts: Ints,
        sums: npt.NDArray[np.float64] | None,
        routes: list[list[list[int]]],
    ) -> LayerLoad:
        active = np.flatnonzero(counts)
        return LayerLoad(
            layer,
            tuple(active.tolist()),
            tuple(counts[active].tolist()),
            () if sums is None else tuple(sums[active].tolist()),
            routes[layer],
        )
