"""Makes a `Planner` from settings: the policies' names, and the number and division of slots."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

from tandem.core.errors import ConfigError
from tandem.core.registry import Registry
from tandem.policy.assignment import ASSIGNMENTS, IN_GRAPH, NATIVE, Assignment
from tandem.policy.assignment.rule import Rule
from tandem.policy.cost import CostTable, HardwareProfile, ShapeCosts
from tandem.policy.decider import Decider, PlainDecider
from tandem.policy.eviction import EVICTIONS, Eviction
from tandem.policy.link_queue import UNLIMITED
from tandem.policy.plan import Geometry
from tandem.policy.planner import Planner
from tandem.policy.prediction import PREDICTIONS, Prediction, RegressionPredictor
from tandem.policy.prefetch import PREFETCHES, PrefetchChoice
from tandem.policy.residency import Residency, sets_by_layer
from tandem.policy.ring import OWN_SLOTS, Ring
from tandem.policy.step_path import CAPTURE_SIZES, capture_size
from tandem.policy.tables import LearnsInTables, NextUseTable, Tables

# Price of a second of the link in seconds of computation, because other copies may need the link.
LINK_SHARE = 0.15
# Slots for experts fetched for one use. One launch computes half of them while the other half is
# filled, so small caches have at least two.
RING_SLOTS, RING_SHARE = 32, 1 / 48
GRAPH_RING_SLOTS = 16  # in steps that are one graph
# For prefetches in long prompts, half for the current layer and half for the coming one. A link
# of 25 GB/s fills as many while 2,048 tokens of Qwen3-30B-A3B attend on a 4070.
PROMPT_SLOTS, PROMPT_SHARE = 64, 1 / 32
LEAST_AHEAD_SLOTS = 2  # for prefetches in steps that are one graph, if the cache is not tiny
POOLS = ("by-layer", "shared")
# Default assignments: for planned steps, for steps that are one graph, and for these if fetching
# pays.
PLANNED_RULE, GRAPH_RULE, FETCHING_RULE = "balanced", "ready-on-gpu", "balanced-in-graph"
# The prediction of steps that are one graph, which native code implements.
GRAPH_PREDICTION = "regression"


class Native(NamedTuple):
    """An engine's native parts: the eviction's tables, the predictor, a decider that uses both."""

    next_use: Callable[[Geometry], Sequence[NextUseTable]]  # by layer
    prediction: Callable[[Geometry], Prediction]
    decider: Callable[[PlainDecider], Decider | None]  # None: it does not know these policies


class Policies(NamedTuple):
    """The registries in which names of policies are looked up."""

    assignments: Registry[Assignment] = ASSIGNMENTS
    evictions: Registry[Eviction] = EVICTIONS
    predictions: Registry[Prediction] = PREDICTIONS
    prefetches: Registry[PrefetchChoice] = PREFETCHES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """Everything that defines a planner, apart from the model and the machine."""

    policies: ClassVar[Policies] = Policies()
    """The policies to choose from; subclasses may have more."""
    assignment: str | None = None  # of all steps; None: the best that each step can follow
    eviction: str = "next-use"
    prediction: str = "none"
    prefetch: str = "pays"
    prefetch_count: int = 0  # limit of experts prefetched per layer
    must_prefetch: bool = True  # in all steps; otherwise only in planned ones
    # Sizes of steps in one graph that fetch, if no assignment is given.
    fetching_sizes: tuple[int, ...] = ()
    predicting_sizes: tuple[int, ...] = ()  # sizes of steps in one graph that prefetch
    can_ask: bool = False  # whether such steps may run the next layer's router ahead
    asking_sizes: tuple[int, ...] = ()  # sizes of steps with look-ahead; they predict, too
    copies_prompts: bool = False  # whether slots are set aside for prefetches in long prompts
    pool: str = "by-layer"
    max_fetches: int = UNLIMITED
    never_worse_than_cpu: bool = True
    assignment_options: tuple[tuple[str, object], ...] = ()
    eviction_options: tuple[tuple[str, object], ...] = ()

    def __post_init__(self) -> None:
        """Check names and numbers, and replace former names of policies by current names.

        For an unknown name, `ConfigError` lists the nearest names.
        """
        self.policies.assignments.factory(self.rule())
        object.__setattr__(self, "eviction", self.policies.evictions.today(self.eviction))
        self.policies.evictions.factory(self.eviction)
        object.__setattr__(self, "prediction", self.policies.predictions.today(self.prediction))
        self.policies.predictions.factory(self.prediction)
        self.policies.prefetches.factory(self.prefetch)
        if self.pool not in POOLS:
            raise ConfigError(f"pool is {self.pool!r}; expected one of {', '.join(POOLS)}")
        if self.prefetch_count < 0:
            raise ConfigError(f"prefetch_count is {self.prefetch_count}; expected at least 0")

    def rule(self, *, graph_tokens: int = 0) -> str:
        """Return the name of the assignment for planned steps, or for steps in one graph.

        `graph_tokens` is the number of tokens of a step in one graph; 0: the step is planned.
        """
        if not graph_tokens:
            return self.assignment or PLANNED_RULE
        if self.assignment in IN_GRAPH:
            return self.assignment
        return FETCHING_RULE if capture_size(graph_tokens) in self.fetching_sizes else GRAPH_RULE

    def graph_rules(self) -> str:
        """Return a text about steps in one graph: their rules, and the sizes that prefetch."""
        names = {size: self.rule(graph_tokens=size) for size in CAPTURE_SIZES}
        rules, ahead = names[1], " or ".join(map(str, self.predicting_sizes))
        if len({*names.values()}) > 1:
            fetching = " or ".join(str(size) for size, name in names.items() if name != GRAPH_RULE)
            rules = f"{FETCHING_RULE} of {fetching} tokens, {GRAPH_RULE} of others"
        noun = "token" if ahead == "1" else "tokens"
        rules += f", prefetches in steps of {ahead} {noun}" if ahead else ""
        asking = " or ".join(map(str, self.asking_sizes))
        return f"{rules}, look-ahead in those of {asking}" if asking else rules

    def why_planned(self) -> str | None:
        """Return the first option that a step in one graph cannot follow; None if there is none.

        The option is given with its value, such as "pool shared".
        """
        if self.assignment_options or self.assignment not in (None, *IN_GRAPH):
            options = [f"{name} {value}" for name, value in self.assignment_options]
            return " ".join([f"assignment {self.rule()}", *options])
        if self.eviction_options or self.eviction != "next-use":
            options = [f"{name} {value}" for name, value in self.eviction_options]
            return " ".join([f"eviction {self.eviction}", *options])
        if self.pool != "by-layer":
            return f"pool {self.pool}"
        if self.can_prefetch and self.must_prefetch and self.prediction != GRAPH_PREDICTION:
            return f"prediction {self.prediction} with prefetch_count {self.prefetch_count}"
        if self.can_prefetch and self.prefetch == "top-k":
            return f"prefetch {self.prefetch}"
        return None

    @property
    def may_predict(self) -> bool:
        """Whether steps in one graph may prefetch without request, in slots for long prompts."""
        is_requested = self.must_prefetch or self.prediction != GRAPH_PREDICTION
        return self.can_prefetch and not is_requested and self.copies_prompts

    @property
    def may_ask(self) -> bool:
        """Whether steps in one graph may run the next layer's router ahead."""
        return self.can_ask and self.can_prefetch and self.prediction == GRAPH_PREDICTION

    def with_predictions(
        self, sizes: tuple[int, ...], asking_sizes: tuple[int, ...] = ()
    ) -> "PlannerSettings":
        """Return settings in which steps in one graph prefetch if their size is in `sizes`.

        With `must_prefetch`, all sizes prefetch. Steps with a size in `asking_sizes` prefetch too,
        and run each next layer's router ahead. Settings that do not prefetch, or have another
        prediction than `GRAPH_PREDICTION`, are returned unchanged.
        """
        if not self.can_prefetch or self.prediction != GRAPH_PREDICTION:
            return self
        some = {*(CAPTURE_SIZES if self.must_prefetch else sizes), *asking_sizes}
        return dataclasses.replace(
            self, predicting_sizes=tuple(sorted(some)), asking_sizes=asking_sizes
        )

    @property
    def can_prefetch(self) -> bool:
        """Whether predicted experts are prefetched in any step."""
        return self.prefetch_count > 0 and self.prediction != "none"

    def set_sizes(self, geometry: Geometry, num_slots: int) -> list[int]:
        """Return the sizes of the cache's sets.

        Their sum is `num_slots` minus `extra_slots(num_slots)`.
        """
        cached = num_slots - self.extra_slots(num_slots)
        return [cached] if self.pool == "shared" else sets_by_layer(cached, geometry.num_layers)

    def whole_set_sizes(self, geometry: Geometry, num_slots: int) -> list[int]:
        """Return the sizes that the cache's sets would have if all slots belonged to them."""
        if self.pool == "shared":
            return [num_slots]
        return sets_by_layer(num_slots, geometry.num_layers)

    def staging_slots(self, num_slots: int) -> int:
        """Return how many of `num_slots` slots are staging slots, for prefetched experts."""
        if not self.can_prefetch:
            return 0
        if self.prefetch == "top-k":
            return min(2 * self.prefetch_count, num_slots // 4)
        if not self.copies_prompts and not self.predicting_sizes:
            return 0
        least = min(LEAST_AHEAD_SLOTS, num_slots // 8) if self.predicting_sizes else 0
        return min(PROMPT_SLOTS, max(least, int(num_slots * PROMPT_SHARE)))

    def ring_slots(self, num_slots: int) -> int:
        """Return the most slots of the ring, its own and borrowed, for a total of `num_slots`."""
        return min(RING_SLOTS, num_slots // 4, max(2, int(num_slots * RING_SHARE)))

    def extra_slots(self, num_slots: int) -> int:
        """Return how many of `num_slots` slots are not part of the cache proper."""
        return self.staging_slots(num_slots) + min(OWN_SLOTS, self.ring_slots(num_slots))

    def slots_for(self, num_cached: int) -> int:
        """Return the smallest number of slots of which `num_cached` belong to the cache proper."""
        num_slots = num_cached
        while num_slots - self.extra_slots(num_slots) < num_cached:
            num_slots = num_cached + self.extra_slots(num_slots)
        return num_slots


def make_planner(
    settings: PlannerSettings,
    geometry: Geometry,
    costs: CostTable,
    num_slots: int,
    *,
    resident: Iterable[int] = (),
    copy_price_seconds: float = 0.0,
    like: Planner | None = None,
    tables: Native | None = None,
) -> Planner:
    """Build a planner for `num_slots` equal slots; `resident` are the keys present at the start.

    Slots are numbered from 0: first those of the cache's sets, then staging slots, then the ring's
    own. If a planner `like` is given, the new planner takes over its eviction and prediction, with
    all that they have learned; otherwise new policies learn in `tables`, if given.
    """
    sizes = settings.set_sizes(geometry, num_slots)
    staging = settings.staging_slots(num_slots)
    residency = Residency(geometry, sizes, staging)
    eviction = like.eviction if like else None
    if eviction is None:
        make = with_tables(settings.policies.evictions.factory(settings.eviction), tables)
        eviction = make(geometry, **dict(settings.eviction_options))
    eviction.resized(sizes)
    own, in_graph = range(residency.num_slots, num_slots), min(GRAPH_RING_SLOTS, num_slots // 4)
    ring = Ring(residency, eviction, own, settings.ring_slots(num_slots), in_graph)
    prediction = like.prediction if like else _prediction(settings, geometry, tables)
    policies, name = settings.policies, settings.rule()
    planner = Planner(
        geometry,
        costs,
        residency,
        rule=Rule(
            policies.assignments.factory(name)(**dict(settings.assignment_options)),
            never_worse_than_cpu=settings.never_worse_than_cpu,
            native=_native(name, settings.assignment_options),
        ),
        graph_rules={size: _graph_rule(settings, size) for size in CAPTURE_SIZES},
        eviction=eviction,
        prediction=prediction,
        prefetch=policies.prefetches.factory(settings.prefetch)(count=settings.prefetch_count),
        ring=ring,
        max_fetches=settings.max_fetches,
        can_prefetch=settings.can_prefetch,
        predicting_sizes=settings.predicting_sizes,
        asking_sizes=settings.asking_sizes,
        copy_price_seconds=copy_price_seconds,
        decider=tables.decider if tables else None,
    )
    for key in resident:
        residency.insert(key, residency.set_of(key // geometry.num_experts))
        residency.finish(key)
    return planner


def make_planner_on(
    profile: HardwareProfile,
    shape: ShapeCosts,
    settings: PlannerSettings,
    geometry: Geometry,
    num_slots: int,
    *,
    resident: Iterable[int] = (),
    like: Planner | None = None,
    tables: Native | None = None,
) -> Planner:
    """Build a planner with a machine's costs, as the engine and the simulator do."""
    costs = CostTable(
        shape,
        link_slowdown=profile.link_slowdown_while_computing,
        cpu_slowdown=profile.cpu_slowdown_while_copying,
        read_seconds=profile.disk.read_seconds(shape.expert_bytes) if profile.disk else 0.0,
    )
    price = (profile.cpu_slowdown_while_copying - 1.0 + LINK_SHARE) * costs.link
    return make_planner(
        settings,
        geometry,
        costs,
        num_slots,
        resident=resident,
        copy_price_seconds=price,
        like=like,
        tables=tables,
    )


def _graph_rule(settings: PlannerSettings, size: int) -> Rule:
    name = settings.rule(graph_tokens=size)
    return Rule(
        settings.policies.assignments.factory(name)(),
        never_worse_than_cpu=False,  # experts that the device has published as its own stay there
        native=_native(name, ()),
        fetches=name != GRAPH_RULE,
        in_graph=True,
    )


def _native(name: str, options: Sequence[object]) -> int | None:
    """Return the number of an assignment's native form; None without one, or with options."""
    return NATIVE.index(name) if name in NATIVE and not options else None


def _prediction(settings: PlannerSettings, geometry: Geometry, tables: Native | None) -> Prediction:
    make = settings.policies.predictions.factory(settings.prediction)
    return tables.prediction(geometry) if tables and make is RegressionPredictor else make(geometry)


def with_tables(make: Callable[..., Eviction], tables: Tables | None) -> Callable[..., Eviction]:
    """Return the eviction factory `make`, with `tables` bound if its evictions learn in tables."""
    learns = isinstance(make, type) and issubclass(make, LearnsInTables)
    return partial(make, tables=tables) if learns and tables is not None else make
