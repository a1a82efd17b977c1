"""`tandem run --explain`: what limited the speed of a run, and what one change would gain.

The explanation lists the operations of a decode step and of a prompt that are not native (torch or
Python runs them), and counts the drafts. With an expert cache it also lists what happened in each
layer, and replays the run's routing in the simulator with one change at a time. These forecasts are
as accurate as the hardware profile.
"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from tandem.experts.cache.expert_cache import ExpertCache
from tandem.experts.execution.executor import unheard
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.experts.store.host_store import HostStore
from tandem.experts.tracing.cache_statistics import CacheStatistics, LayerCounts
from tandem.foreign_types import PreTrainedModel
from tandem.generate.speculation.draft_counts import DraftCounts
from tandem.kernels.formats.weight_format import find_format
from tandem.policy.cost import HardwareProfile, ShapeCosts
from tandem.policy.eviction import Eviction
from tandem.sim.replay import ReplaySettings, replay
from tandem.sim.start import SIMULATED_STARTS

if TYPE_CHECKING:
    from tandem.experts.execution.recorder import RoutingRecorder
    from tandem.generate.answer import Answer
    from tandem.generate.generator import Generator
    from tandem.generate.speculation.speculation import Speculation
    from tandem.recording.coverage import Coverage, PromptCoverage
    from tandem.trace import RoutingTrace

SMALLER_FORMAT = "int4"
_PROMPT_TOKENS = 128


def layer_table(statistics: CacheStatistics, eviction: Eviction) -> str:
    """Return a table of each layer's hits, copies, waits and eviction rule, and of the totals."""
    head = (
        f"{'layer':>5} {'active':>7} {'hits':>6} {'hit %':>6} {'fetched':>8} {'copied':>7} "
        f"{'ahead':>6} {'device %':>9} {'device idle':>12} {'CPU idle':>9}  evicts by"
    )
    lines = [head]
    for layer, counts in sorted(statistics.layers.items()):
        lines.append(f"{_row(str(layer), counts)}  {eviction.rule(layer)}".rstrip())
    lines.append(_row("all", sum(statistics.layers.values(), LayerCounts())))
    return "\n".join(lines)


def _row(name: str, counts: LayerCounts) -> str:
    active = max(1, counts.active)
    return (
        f"{name:>5} {counts.active:>7} {counts.hits:>6} {counts.hits / active:>6.0%} "
        f"{counts.fetched:>8} {counts.inserted:>7} {counts.prefetched:>6} "
        f"{counts.on_device / active:>9.0%} {counts.device_waited_seconds * 1e3:>9.1f} ms "
        f"{counts.cpu_waited_seconds * 1e3:>6.1f} ms"
    )


class Change(NamedTuple):
    """One change of the conditions, and the seconds that the run would take with the change."""

    what: str
    seconds: float


class _Conditions(NamedTuple):
    """The machine, costs, number of slots and kind of decode steps that a replay assumes."""

    profile: HardwareProfile
    shape: ShapeCosts
    num_slots: int
    in_graph: bool


def what_if(trace: "RoutingTrace", cache: ExpertCache, *, in_graph: bool = False) -> list[Change]:
    """Simulate the run as it was, then with one change at a time.

    Returns the unchanged run, then the changes, the fastest first. `in_graph` says whether the
    run's decode steps followed an in-graph rule.
    """
    now = _Conditions(cache.machine.profile, cache.machine.shape, cache.num_slots, in_graph)
    as_it_is = Change("as it is", _seconds(trace, cache, now))
    changes = [Change(what, _seconds(trace, cache, c)) for what, c in _changes(cache, now)]
    return [as_it_is, *sorted(changes, key=lambda change: change.seconds)]


def _changes(cache: ExpertCache, now: _Conditions) -> Iterator[tuple[str, _Conditions]]:
    profile, shape, num_slots, _ = now
    geometry = cache.geometry
    every = geometry.num_layers * geometry.num_experts
    if num_slots < every:
        more = min(every, 2 * num_slots)
        yield f"{more} slots instead of {num_slots}", now._replace(num_slots=more)
    smaller = _image_bytes(cache.store, SMALLER_FORMAT)
    if smaller < 0.9 * cache.slot_bytes:
        ratio = smaller / cache.slot_bytes
        packed = dataclasses.replace(
            shape,
            # At few tokens an expert costs the time to read its weights.
            cpu_seconds=tuple(seconds * ratio for seconds in shape.cpu_seconds),
            gpu_seconds=tuple(seconds * ratio for seconds in shape.gpu_seconds),
            link_seconds_per_expert=shape.link_seconds_per_expert * ratio,
        )
        slots = min(every, int(num_slots / ratio))
        smaller_experts = now._replace(shape=packed, num_slots=slots)
        yield f"experts in {SMALLER_FORMAT} ({slots} slots)", smaller_experts
    threads = profile.cpu_threads
    faster = dataclasses.replace(shape, cpu_seconds=tuple(s / 2 for s in shape.cpu_seconds))
    yield f"{2 * threads} threads, twice as fast, instead of {threads}", now._replace(shape=faster)
    half = dataclasses.replace(shape, link_seconds_per_expert=shape.link_seconds_per_expert / 2)
    yield "a link twice as fast", now._replace(shape=half)


def _image_bytes(store: HostStore, name: str) -> int:
    """Return the bytes of the largest expert in another format; allocates nothing."""
    other = HostStore()
    for layer in store:
        other.add_layer(layer.arrivals.name, layer.arrivals.shapes, expert_dtype=find_format(name))
    return max(layer.image_bytes for layer in other)


def _seconds(trace: "RoutingTrace", cache: ExpertCache, conditions: _Conditions) -> float:
    profile, shape, num_slots, in_graph = conditions
    run = ReplaySettings(
        settings=cache.settings,
        profile=profile,
        shape=shape,
        num_slots=num_slots,
        prompt=None,
        compare_every=0,
        in_graph=in_graph,
    )
    # All sizes start from the same experts, as the cache's real content is known only for one size.
    sizes = cache.settings.set_sizes(cache.geometry, num_slots)
    resident = SIMULATED_STARTS.factory("hottest")(cache.geometry, sizes, trace)
    return replay(trace, run, resident=resident).total_seconds


def change_table(changes: list[Change], num_tokens: int) -> str:
    """Return a table with the run's time, tok/s and speed-up for each change."""
    base = changes[0].seconds
    lines = [
        "by the simulator, on the profile's times, without drafted tokens this run would take:"
    ]
    for change in changes:
        lines.append(
            f"  {change.what:<44} {change.seconds * 1e3:>9.1f} ms  "
            f"{num_tokens / change.seconds:>8.1f} tok/s  {base / change.seconds:>5.2f} x"
        )
    return "\n".join(lines)


class DecodeStep(NamedTuple):
    """The operations of a decode step and of a prompt that torch or Python runs, if known."""

    coverage: "Coverage | None"
    why_slower: str | None
    prompt: "PromptCoverage | None" = None

    def line(self) -> str:
        """Return a text about the operations that are not native, and their cost."""
        why = self.why_slower or "no decode step was replayed"
        step = self.coverage
        lines = [step.line() if step is not None else f"not native: not counted, as {why}"]
        return "\n".join([*lines, *([] if self.prompt is None else [self.prompt.line()])])

    def json(self) -> dict[str, object]:
        """Return the data as JSON; unknown values are None."""
        return {
            "not_native": _entries(self.coverage),
            "prompt_not_native": _entries(self.prompt),
            "why_slower": self.why_slower,
        }


def _entries(coverage: "Coverage | PromptCoverage | None") -> list[dict[str, object]] | None:
    return None if coverage is None else [dataclasses.asdict(e) for e in coverage.not_native]


def decode_step(generator: "Generator") -> DecodeStep:
    """Profile the generator's recorded decode step, if it has one, and a short prompt."""
    from tandem.hf.runtime import require_runtime
    from tandem.recording.coverage import coverage_of

    recorded = generator.recorded_graph
    with unheard(require_runtime(generator.model).executor):
        coverage = coverage_of(recorded) if recorded is not None else None
        prompt = _prompt(generator)
    return DecodeStep(coverage, generator.why_slower, prompt)


def _prompt(generator: "Generator") -> "PromptCoverage | None":
    """Profile a short prompt in a sequence slot of its own.

    Returns None on a GPU, for a model without sequence slots, or if the planner would learn from
    the prompt.
    """
    from tandem.hf.lookahead.warm_up import warm_up_ids
    from tandem.hf.runtime import require_runtime
    from tandem.recording.coverage import coverage_of_prompt

    needs_steps = require_runtime(generator.model).executor.needs_steps
    if generator.why_padded is not None or needs_steps or generator.model.device.type != "cpu":
        return None
    ids = warm_up_ids(generator.model, _PROMPT_TOKENS).tolist()
    pool = generator.slot_pool(1, capacity=_PROMPT_TOKENS)

    def run() -> None:
        pool.prefill({0: ids})
        pool.keep(0, 0)

    return coverage_of_prompt(run, _PROMPT_TOKENS)


class Drafting:
    """Counts a run's drafts from the creation of this object on."""

    def __init__(self, speculation: "Speculation | None") -> None:
        """Start counting; `speculation` is None if the user switched drafts off."""
        self._speculation = speculation
        self._before = DraftCounts() if speculation is None else speculation.counts.copy()

    @property
    def _why_none(self) -> str | None:
        return "--speculate none" if self._speculation is None else self._speculation.why_none

    @property
    def _counts(self) -> DraftCounts:
        now = DraftCounts() if self._speculation is None else self._speculation.counts
        return now.since(self._before)

    def line(self, answer: "Answer") -> str:
        """Return a line about the number of drafted tokens, or why there are none."""
        if self._why_none is not None:
            return f"speculation: nothing is drafted: {self._why_none}"
        text = f"speculation: {answer.drafted_tokens} tokens drafted, {answer.accepted_tokens} kept"
        return f"{text}; {self._counts.line()}"

    def json(self) -> dict[str, object]:
        """Return the counts as JSON: decode steps by number of drafted tokens, and unpaid steps.

        Unpaid steps verified no draft, because that would have cost time.
        """
        counts = self._counts
        return {
            "steps_by_drafted_tokens": {str(n): steps for n, steps in sorted(counts.steps.items())},
            "steps_that_would_not_have_paid": counts.num_unpaid,
            "why_nothing_is_drafted": self._why_none,
        }


class Explanation:
    """Watches a model's run from the creation of this object to `finish`; explains the speed."""

    def __init__(self, model: PreTrainedModel, generator: "Generator") -> None:
        """Start watching a model's runs."""
        from tandem.hf.runtime import require_runtime

        self._generator = generator
        self._drafting = Drafting(generator.speculation)
        self._runtime = require_runtime(model)
        self._executor, self._expert_cache = self._runtime.executor, self._runtime.executor.cache
        self._statistics = CacheStatistics()
        self._recorder: RoutingRecorder | None = None
        if self._expert_cache is not None:
            self._watch()

    def _watch(self) -> None:
        from tandem.experts.execution.recorder import RoutingRecorder

        self._recorder = RoutingRecorder(self._executor, hears_of_drafts=True)
        if self._generator.speculation is not None:
            self._generator.speculation.on_kept = self._recorder.keep
        self._runtime.use(self._recorder)
        self._generator.prepare()  # this tries the model's steps, which are no part of the run
        self._executor.listeners.append(self._statistics)
        self._recorder.begin_sequences()

    def finish(self, answer: "Answer") -> tuple[str, dict[str, object]]:
        """Stop watching; return the explanation as text, and its numbers as JSON."""
        tables = self._cache_tables()
        if len(answer.token_ids) > 1:
            step = decode_step(self._generator)
        else:  # profiling would repeat an earlier answer's step and write to the KV cache
            step = DecodeStep(None, self._generator.why_slower)
        text = "\n\n".join([step.line(), self._drafting.line(answer), *tables])
        return text, {**step.json(), **self._drafting.json()}

    def _cache_tables(self) -> list[str]:
        """Stop counting; return texts on the expert cache and on possible gains.

        Returns [] for a model without an expert cache.
        """
        if self._recorder is None or self._expert_cache is None:
            return []
        self._runtime.use(self._executor)
        if self._generator.speculation is not None:
            self._generator.speculation.on_kept = None
        self._executor.catch_up()
        self._executor.listeners.remove(self._statistics)
        self._recorder.pause()  # the recorded graph still calls it
        trace = self._recorder.trace("this run")
        executor, cache = self._executor, self._expert_cache
        in_graph = isinstance(executor, HybridExecutor) and executor.in_graph
        changes = what_if(trace, cache, in_graph=in_graph)
        rules = cache.settings.graph_rules() if in_graph else cache.settings.rule()
        return [
            f"decode steps by {rules}",
            layer_table(self._statistics, cache.planner.eviction),
            change_table(changes, trace.num_tokens),
        ]
