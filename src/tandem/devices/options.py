"""The user's options for offloading: names and sizes.

Loads no torch, so that `--help` is fast.
"""

import argparse
import dataclasses
from collections.abc import Collection, Sequence
from typing import ClassVar

from tandem.core.config import from_flags, option, require_range
from tandem.core.errors import ConfigError
from tandem.core.registry import nearest_names
from tandem.core.units import parse_bandwidth, parse_bytes
from tandem.devices import DEVICES, kind_of
from tandem.experts.cache.sizing import parse_gpu_memory
from tandem.experts.cache.start import STARTS
from tandem.policy.assignment import ASSIGNMENTS, IN_GRAPH
from tandem.policy.eviction import EVICTIONS, IN_HOST_SLOTS
from tandem.policy.prediction import PREDICTIONS
from tandem.policy.settings import POOLS, PlannerSettings

_OF_ONE_DEVICE = {"emulated_speed": "emulated"}
_OF_DENSE_PARTS = ("threads", "device", "importance", "context", "sequences")
# Defaults of what is prefetched in planned steps.
DEFAULT_PREDICTION, DEFAULT_PREFETCH_COUNT = "regression", 2


@dataclasses.dataclass(kw_only=True, repr=False)
class OffloadOptions:
    """Where a model's experts are stored, and which processor computes them."""

    rare: ClassVar[tuple[str, ...]] = (
        "link_bandwidth", "emulated_speed", "decode_graph", "profile", "start_content",
        "assignment", "eviction", "prediction", "look_ahead", "residuals", "prefetch_count", "pool",
    )  # fmt: skip
    """Options that few users need."""
    planner: ClassVar[type[PlannerSettings]] = PlannerSettings
    """The class of the object that `planner_settings` returns; the class checks policies' names."""
    expert_dtype: str = option(
        "auto",
        help="experts in host memory: auto (as loaded), bf16, fp16, fp32, int8, int4, mxfp4, ...",
        metavar="DTYPE",
    )
    importance: str | None = option(
        None,
        help="importance of inputs when weights are rounded: a file of tandem importance or an "
        "imatrix of llama.cpp; auto: what tandem importance has stored for this model",
        metavar="FILE",
    )
    threads: int | None = option(
        None,
        help="CPU threads that compute experts (default: one for each fast core; with a GPU, up to "
        "two fewer if all processors would compute)",
        metavar="N",
    )
    device: str = option(
        "cpu",
        help="; ".join(f"{name}: {kind_of(name).help}" for name in DEVICES),
        choices=DEVICES.names(),
    )
    gpu_memory: str = option(
        "auto",
        help="the device's memory that Tandem may use: 8GiB, 300MB, 0.5 (of it), auto (nine "
        "tenths of what is free)",
        metavar="SIZE",
    )
    expert_memory: str = option(
        "auto",
        help="host memory for experts of a packed model, the others stay on the disk: 12GB, auto "
        "(all where they fit, else what is free)",
        metavar="SIZE",
    )
    link_bandwidth: str | None = option(
        None, help="limit the link to this rate (default: as measured)", metavar="RATE"
    )
    emulated_speed: float = option(
        8.0, help="how many times faster than this CPU the emulated device computes", metavar="X"
    )
    decode_graph: bool = option(
        True, help="a GPU's decode steps are one graph each, answered by a thread, where that works"
    )
    profile: str | None = option(
        None, help="hardware profile: a name or a file (default: as measured)", metavar="PROFILE"
    )
    start_content: str = option(
        "heat", help="initial content of the expert cache", choices=STARTS.names()
    )
    assignment: str | None = option(
        None,
        help="who computes each active expert (default: balanced; in steps that are one graph "
        "balanced-in-graph where a trial at load says that it pays, else ready-on-gpu)",
        choices=ASSIGNMENTS.names(),
    )
    eviction: str = option(
        "next-use",
        help="eviction policy of the expert cache, and of memory over a disk (next-use, lru)",
        choices=EVICTIONS.names(),
        former=EVICTIONS.former,
    )
    prediction: str | None = option(
        None,
        help="predictor of the next layers' experts (default: regression where steps are planned)",
        choices=PREDICTIONS.names(),
        former=PREDICTIONS.former,
    )
    look_ahead: bool = option(
        False,
        help="let prediction regression ask the next layer's router too (in steps that are one "
        "graph, where a trial says that it pays)",
    )
    residuals: str | None = option(
        None, help="residual vectors of tandem calibrate (default: this model's)", metavar="FILE"
    )
    prefetch_count: int | None = option(
        None,
        help="experts prefetched per layer, at most (default: 2; in steps that are one graph, "
        "where a trial says that it pays)",
        metavar="N",
    )
    pool: str = option("by-layer", help="how slots are shared over layers", choices=POOLS)
    prefetch: str = "pays"
    """The name of the rule by which predicted experts are prefetched; see `PlannerSettings`."""
    context: int | None = None
    """Tokens per sequence for which room in the KV cache is reserved if experts run from the disk;
    None: the length of a typical conversation."""
    sequences: int = 1
    """The number of sequences of `context` tokens for which room is reserved."""

    def __post_init__(self) -> None:
        """Check every field; a `ConfigError` names the field, its value and the expected values."""
        if self.threads is not None:
            require_range("threads", self.threads, 1, 1024, what="a number of threads")
        if self.device not in DEVICES.names():
            hint = nearest_names(self.device, DEVICES.names())
            raise ConfigError(f"device is {self.device!r}, which Tandem does not know; {hint}")
        if self.context is not None:
            require_range("context", self.context, 1, what="a number of tokens")
        require_range("sequences", self.sequences, 1, what="a number of sequences")
        require_range("emulated_speed", self.emulated_speed, 0.01, 1e6, what="a factor")
        if self.link_bandwidth is not None:
            parse_bandwidth(self.link_bandwidth, name="link_bandwidth")
        object.__setattr__(self, "eviction", EVICTIONS.today(self.eviction))
        STARTS.factory(self.start_content)
        parse_gpu_memory(self.gpu_memory)
        self.planner_settings()
        if self.expert_memory_bytes is not None:
            self.require_slots_follow()

    @property
    def num_threads(self) -> int:
        """The number of CPU threads that compute experts: as given, or the default."""
        from tandem.kernels.cpu import usable_topology

        others = kind_of(self.device).spinning_threads
        return self.threads or usable_topology().threads_beside(others)

    @property
    def expert_memory_bytes(self) -> int | None:
        """The bytes of host memory for experts; None: for all experts, at most what is free."""
        if self.expert_memory == "auto":
            return None
        return parse_bytes(self.expert_memory, name="expert_memory")

    def require_no_slots(self, model: str) -> None:
        """Raise `ConfigError` if `expert_memory` is given.

        Call this for a model that is not packed; `model` is its name in the error message.
        """
        if self.expert_memory_bytes is not None:
            raise ConfigError(
                f"expert_memory is {self.expert_memory!r}, and {model} is not packed: experts come "
                "from the disk in packed form; pack it first (tandem pack, or --pack-to-disk)"
            )

    def no_slots_for_plain(self) -> ConfigError:
        """Return the error for `expert_memory` with a model whose experts are fp32."""
        return ConfigError(
            f"expert_memory is {self.expert_memory!r}, and this model's experts are plain (fp32): "
            "they run from memory alone; leave it out, or pack the model with another expert_dtype "
            "(bf16, int8)"
        )

    def require_dense(self, model: str, *, is_on_gpu: bool) -> None:
        """Raise `ConfigError` for options that do not apply to a model without experts.

        `is_on_gpu` says whether the model will be on a GPU, whatever `device` is.
        """
        kind = kind_of(self.device)
        if kind.machine and not kind.holds_dense_parts:
            raise ConfigError(
                f"{model} is a dense model: it has no experts to share with device "
                f"{self.device!r}, which computes nothing else; give device 'cpu', or 'cuda' where "
                "a GPU holds all of it"
            )
        followed: tuple[str, ...] = _OF_DENSE_PARTS
        if is_on_gpu or kind.holds_dense_parts:
            followed += ("gpu_memory",)
        defaults = {field.name: field.default for field in dataclasses.fields(OffloadOptions)}
        own = dataclasses.asdict(self)
        of_experts = [name for name in defaults if name not in followed]
        names = [name for name in of_experts if own[name] != defaults[name]]
        if names:
            raise ConfigError(
                f"{', '.join(names)}: only for experts, and {model} is a dense model, which has "
                "none; leave it out (dense_dtype packs linear layers)"
            )

    def require_slots_follow(self) -> None:
        """Raise `ConfigError` for options that a model with experts on a disk does not support."""
        if self.eviction not in IN_HOST_SLOTS:
            raise ConfigError(
                f"eviction is {self.eviction!r}, and experts on a disk are kept in memory by one "
                f"of {', '.join(IN_HOST_SLOTS)}; choose one of them, or free memory for all experts"
            )
        if self.device != "cpu" and self.assignment in IN_GRAPH[1:]:
            raise ConfigError(
                f"assignment is {self.assignment!r}, which fetches within a step, and experts on a "
                f"disk are not fetched so; choose {IN_GRAPH[0]} or one that plans each layer "
                "(balanced), or free memory for all experts"
            )

    def planner_settings(self) -> PlannerSettings:
        """Return the planner's settings: the options that concern it, with their defaults."""
        count = self.prefetch_count
        return self.planner(
            assignment=self.assignment,
            eviction=self.eviction,
            prediction=self.prediction or DEFAULT_PREDICTION,
            prefetch=self.prefetch,
            prefetch_count=DEFAULT_PREFETCH_COUNT if count is None else count,
            must_prefetch=count is not None or self.prediction is not None,
            can_ask=self.look_ahead,
            pool=self.pool,
            # Over a real link, prompts gain more from these slots than decode steps lose.
            copies_prompts=kind_of(self.device).holds_dense_parts,
        )

    def why_planned(self) -> str | None:
        """Return the option that prevents decode steps in one graph; None if no option does."""
        if not kind_of(self.device).has_graphs:
            return f"device {self.device}"
        if not self.decode_graph:
            return "no-decode-graph"
        return self.planner_settings().why_planned()


def offload_options(flags: argparse.Namespace, also_of_cpu: Collection[str] = ()) -> OffloadOptions:
    """Return the options from parsed flags; raises `ConfigError` also for flags without effect.

    `also_of_cpu` names the device options that this command uses even with `--device cpu`.
    """
    options = from_flags(OffloadOptions, flags)
    of_a_device = ("gpu_memory", *OffloadOptions.rare)
    names = [name for name in of_a_device if vars(flags).get(name) is not None]
    if options.expert_memory_bytes is not None and "eviction" in names:
        names.remove("eviction")  # host slots use it, too
    given_of_device = [name for name in names if name not in also_of_cpu]
    if options.device == "cpu" and given_of_device:
        raise ConfigError(
            f"{_flags(given_of_device)}: only for a device beside the CPU, and there is none "
            "(--device cpu); leave it out, or give --device cuda or emulated"
        )
    of_others = [
        name for name in names if _OF_ONE_DEVICE.get(name, options.device) != options.device
    ]
    if of_others:
        raise ConfigError(f"{_flags(of_others)}: not for --device {options.device}; leave it out")
    if options.residuals is not None and not options.look_ahead:
        raise ConfigError("--residuals: no router is run ahead; give --look-ahead, or leave it out")
    return options


def _flags(names: Sequence[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)
