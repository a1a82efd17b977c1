"""Eviction by predicted next use, or by a simpler rule that has more hits (`next-use`).

Predicted next use is an online regression of Belady's criterion. The score of expert e:
DISCOUNT**(d - 1) if e is used next in d steps, 0 beyond HORIZON steps.
Each layer predicts the scores of all experts at once, as the sum of one row per expert that the
layer used just now and one row per expert that the layer above used. HORIZON steps later the true
score is known, and a part of the error is added to each row of that sum (the delta rule). Two
decayed counts steady the sum. A miss is admitted only if its score is above that of the expert that
it would evict.

Each layer also keeps the scores of two other rules, LRU and a slowly decayed count. It starts with
LRU and later follows the rule with the most hits (`rule_choice`). LRU or the count may have the
most hits on loops, or where the cache holds most experts.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from tandem.policy.eviction.policy import Eviction
from tandem.policy.eviction.rule_choice import NEXT_USE, RECENCY, RULES, RuleChoice, Start
from tandem.policy.lanes import ONE, Lanes
from tandem.policy.plan import Geometry, LayerLoad
from tandem.policy.regression import Regression, rate_shift, sum_rows
from tandem.policy.tables import LearnsInTables, NextUseTable, Tables

# Fitted on every second sequence of the traces; docs/policies.md reports the others.
HORIZON, DISCOUNT = 8, 0.8
RATE = 0.06  # share of the error that each step corrects, divided among the rows
FAST_SHIFT, SLOW_SHIFT = 2, 4
STEADY_SHIFT = 5  # for the rule "decayed"
MAX_TOKENS = 64  # limit for the counted tokens of an expert in one step
PROMPT_TOKENS = 16  # a prompt counts as at most this many steps of one token
PREDICTED_SHIFT = 2  # weight of the predicted sum relative to each count: 4 to 1


class Span(NamedTuple):
    """How far predictions of the next use reach, and how fast scores fall with distance."""

    horizon: int
    """The most steps until a next use that still counts; the score of later uses is 0."""
    discount: float
    """The factor on the score for each step that passes until the next use."""


USUAL_SPAN = Span(HORIZON, DISCOUNT)
# In memory over a disk every miss is read anyway and there are many slots, so an evicted expert
# should not be needed for long. Chosen on the traces' even sequences with 30 to 85 % of the experts
# in memory.
_STEPS_A_TOKEN, _LONGEST_HORIZON = 3, 32


def span_for(num_slots: int, top_k: int) -> Span:
    """Return the span for a layer with `num_slots` slots, of which a token uses `top_k`."""
    horizon = min(max(_STEPS_A_TOKEN * num_slots // top_k, HORIZON), _LONGEST_HORIZON)
    return Span(horizon, 1 - (1 - DISCOUNT) * HORIZON / horizon)


class _Use(NamedTuple):
    """A layer's experts in use at one step."""

    load: LayerLoad
    divisor: int  # of the token counts: a prompt is one of the running sequences
    experts: Sequence[int]
    above: Sequence[int]  # experts of the layer above


def prior_of(geometry: Geometry, span: Span = USUAL_SPAN) -> float:
    """Return the initial score, the same for each expert: all are equally likely to be used."""
    share = geometry.top_k / geometry.num_experts
    return sum(share * ((1 - share) * span.discount) ** step for step in range(span.horizon))


def losses(span: Span = USUAL_SPAN) -> list[int]:
    """Return by how much the score falls if the next use is in d + 1 steps instead of d.

    The list begins with d = 1 and ends with d = horizon; the unit is 1 / ONE.
    """
    targets = [*(round(ONE * span.discount**step) for step in range(span.horizon)), 0]
    return [now - later for now, later in pairwise(targets)]


class _Pending(NamedTuple):
    """A layer's prediction at one step, kept until the true scores are known."""

    experts: Sequence[int]
    above: Sequence[int]
    total: int
    used: int


class NextUse(Eviction, LearnsInTables):
    """Ranks experts by their predicted discounted next use, or by the rule that a layer follows.

    A layer's rows are updated lazily: when a score of the layer is read, when `learn` is called,
    or when the layer is touched again. Which of these comes first changes no score.
    """

    background = "idle"

    def __init__(self, geometry: Geometry, *, tables: Tables | None = None) -> None:
        """Start with all experts equally likely; without `tables`, learn in plain Python."""
        self._num_experts = geometry.num_experts
        make = pure_tables if tables is None else tables.next_use
        self.tables = make(geometry)
        """One table per layer."""
        self._above: Sequence[int] = ()
        self._is_prefill = False
        self._batch = 1  # tokens of the last decode step
        self._unlearned: list[NextUseTable] = []

    def resized(self, set_sizes: Sequence[int]) -> None:
        """Set the cache sizes for comparing rules; in a shared pool, layers follow `next-use`."""
        is_by_layer = len(set_sizes) == len(self.tables)
        for layer, table in enumerate(self.tables):
            table.resize(set_sizes[layer] if is_by_layer else 0)

    def rule(self, layer: int) -> str:
        """Return the name of the rule by which a layer was last ranked."""
        return RULES[self.tables[layer].followed()]

    def begin_step(self, *, is_prefill: bool) -> None:
        """Record whether the step is a prefill; the first layer has no layer above it."""
        self._is_prefill = is_prefill
        self._above = ()
        self._unlearned.clear()

    def touch(self, load: LayerLoad) -> None:
        """Record the experts that the layer uses; for a prompt, those of its last token."""
        experts, divisor = load.experts, 1
        num_tokens = len(load.routes)
        if not self._is_prefill:
            self._batch = max(1, num_tokens)
        elif num_tokens:
            experts = tuple(load.routes[-1])
            divisor = max(self._batch, num_tokens // PROMPT_TOKENS)
        table = self.tables[load.layer]
        table.note(load, divisor, experts, self._above)
        self._unlearned.append(table)
        self._above = experts

    def noted_natively(self, num_tokens: int) -> None:
        """Note that native code has recorded a decode step of `num_tokens` tokens in the tables."""
        self._batch = max(1, num_tokens)
        for table in self.tables:
            table.forget_values()

    def learn(self) -> None:
        """Let the tables of the layers touched since the last call learn."""
        for table in self._unlearned:
            table.learn()
        self._unlearned.clear()

    def candidates(
        self, layer: int, misses: Sequence[int], slot_of: Sequence[int]
    ) -> Sequence[int]:
        """Return the misses, the highest score first."""
        if len(misses) < 2:
            return misses
        ranked = sorted(zip([-score for score in self.scores(misses)], misses, strict=True))
        return [key for _, key in ranked]

    def scores(self, keys: Sequence[int]) -> list[float]:
        """Return the scores; their scale is the same in all layers that follow the same rule."""
        if not keys:
            return []
        experts = self._num_experts
        layer = keys[0] // experts
        first = layer * experts
        if first <= min(keys) <= max(keys) < first + experts:
            values = self.tables[layer].values()
            return [values[key - first] for key in keys]
        return [self.tables[key // experts].values()[key % experts] for key in keys]

    def values(self, layer: int) -> memoryview:
        """Return the score of every expert of a layer, 32 bits each."""
        return self.tables[layer].values()

    def admits(self, newcomer: float, victim: float) -> bool:
        """Return whether the newcomer's score is higher."""
        return newcomer > victim


@lru_cache(maxsize=8)
def _lanes(num_experts: int) -> Lanes:
    return Lanes(num_experts)


def pure_tables(geometry: Geometry) -> Sequence[NextUseTable]:
    """Return tables in plain Python, by layer."""
    start = Start()
    return [PureTable(geometry, layer, start) for layer in range(geometry.num_layers)]


class PureTable:
    """One layer's `NextUseTable` in plain Python."""

    def __init__(self, geometry: Geometry, layer: int, start: Start) -> None:
        """Start with all experts equally likely."""
        lanes = _lanes(geometry.num_experts)
        share = geometry.top_k / geometry.num_experts
        prior = prior_of(geometry)
        sources = 2 if layer else 1
        self._lanes = lanes
        self._regression = Regression(lanes)
        row = self._regression.row(prior / (geometry.top_k * sources))
        self._after = [row] * geometry.num_experts  # rows, indexed by an expert used in this layer
        # Rows, indexed by an expert used in the layer above.
        self._below = [row] * geometry.num_experts
        self._losses = losses()
        self._past: deque[_Pending] = deque()
        self._fast = self._slow = self._steady = lanes.filled(share)
        self._last_use = array("I", bytes(lanes.num_bytes))  # expert -> step of its last use
        self._step = 0
        self._choice = RuleChoice(geometry.num_experts, start)
        self._followed = NEXT_USE  # since the last note
        self._noted: _Use | None = None
        self._compared: _Use | None = None  # the use that the choice has not seen yet
        self._values: memoryview | None = None

    def note(
        self, load: LayerLoad, divisor: int, experts: Sequence[int], above: Sequence[int]
    ) -> None:
        """Record the experts that this layer and the layer above use, to be processed later."""
        self.learn()
        self._noted = _Use(load, divisor, experts, above)
        self._followed = self._choice.choose()

    def learn(self) -> None:
        """Process the recorded use, and learn from the prediction made HORIZON steps before it."""
        self._observe()
        if self._compared is not None and self._choice.is_open:
            load, _, experts, _ = self._compared
            scores = [self._scores(rule) for rule in range(len(RULES))]
            self._choice.use(load.experts, scores, is_prompt=[*experts] != [*load.experts])
        self._compared = None
        if len(self._past) > HORIZON:
            self._settle(self._past.popleft())

    def values(self) -> memoryview:
        """Return the scores by expert under the current rule."""
        self._observe()
        if self._values is None:
            self._values = self._scores(self._followed)
        return self._values

    def forget_values(self) -> None:
        """Do nothing: no native code changes this table."""

    def resize(self, capacity: int) -> None:
        """Compare the rules in ghost caches of `capacity` slots; with 0, compare none."""
        self._choice.resize(capacity)

    def followed(self) -> int:
        """Return the index in `RULES` of the rule followed since the last note."""
        return self._followed

    def _scores(self, rule: int) -> memoryview:
        """Return the scores by expert under a rule; those of `next-use` include two counts."""
        if rule == RECENCY:
            return memoryview(array("I", self._last_use))
        if rule != NEXT_USE:
            return self._lanes.read(self._steady)
        total = num_rows = 0
        if self._past:
            last = self._past[-1]
            total, num_rows = last.total, len(last.experts) + len(last.above)
        predicted = self._regression.shifted_sum(total, num_rows, PREDICTED_SHIFT)
        return self._lanes.read(predicted + self._fast + self._slow)

    def _observe(self) -> None:
        if self._noted is None:
            return
        self._compared, self._noted = self._noted, None
        load, divisor, experts, above = self._compared
        lanes = self._lanes
        used = weighed = lanes.used(experts)
        if max(load.tokens) > 1:
            weighed = self._weighed(load, divisor)
        total = sum_rows(self._after, experts) + sum_rows(self._below, above)
        self._past.append(_Pending(experts, above, total, used))
        self._fast = lanes.moved(self._fast, weighed, FAST_SHIFT)
        self._slow = lanes.moved(self._slow, weighed, SLOW_SHIFT)
        self._steady = lanes.moved(self._steady, weighed, STEADY_SHIFT)
        self._step += 1
        for expert in load.experts:
            self._last_use[expert] = self._step
        self._values = None

    def _weighed(self, load: LayerLoad, divisor: int) -> int:
        """Return the row of token counts over `divisor`, at most MAX_TOKENS each.

        Experts with more tokens weigh more, because a hit saves more CPU time.
        """
        unit, half = self._lanes.unit, divisor // 2
        pairs = zip(load.experts, load.tokens, strict=True)
        return sum([unit[e] * min((tokens + half) // divisor, MAX_TOKENS) for e, tokens in pairs])

    def _settle(self, pending: _Pending) -> None:
        """Compute a past prediction's true scores; add a part of the error to each of its rows."""
        num_rows = len(pending.experts) + len(pending.above)
        shift = rate_shift(RATE, num_rows)
        truth = seen = 0
        for loss, later in zip(self._losses, self._past, strict=True):
            seen |= later.used
            truth += seen * loss
        change = self._regression.change(truth, pending.total, num_rows, shift)
        after, below = self._after, self._below
        for expert in pending.experts:
            after[expert] += change
        for expert in pending.above:
            below[expert] += change
