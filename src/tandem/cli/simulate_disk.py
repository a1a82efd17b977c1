"""`tandem simulate --disk`: host slots hold some of the experts; the others are on a disk.

With --gpu-experts, a GPU holds some of the experts, too.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tandem.core.config import option
from tandem.core.errors import ConfigError
from tandem.core.units import format_bytes, parse_bandwidth, parse_bytes

if TYPE_CHECKING:
    from tandem.policy.cost import HardwareProfile, ShapeCosts
    from tandem.sim.simulation import Conditions, Progress, Report
    from tandem.trace import RoutingTrace

_OF_PROFILE = "profile"
_USUAL_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskOptions:
    """Options of `tandem simulate` about experts on a disk and host slots."""

    disk: str | None = option(
        None, metavar="RATE|profile",
        help="experts are on a disk with this rate (2GB/s) or the profile's, memory has slots for "
        "some, and the CPU computes all; with --gpu-experts a GPU has some, too",
    )  # fmt: skip
    host_experts: float | None = option(
        None, metavar="FRACTION",
        help="with --disk: fraction of all experts that memory has slots for (default: 0.5)",
    )  # fmt: skip
    expert_memory: str | None = option(
        None, help="with --disk, instead of --host-experts: memory for slots", metavar="SIZE"
    )

    def __post_init__(self) -> None:
        """Raise `ConfigError` for options without effect, out of range, or in conflict."""
        named = {"--host-experts": self.host_experts, "--expert-memory": self.expert_memory}
        names = [name for name, value in named.items() if value is not None]
        if names and self.disk is None:
            raise ConfigError(f"{names[0]} sets the memory over a disk; give --disk too")
        if self.host_experts is not None and not 0 <= self.host_experts <= 1:
            raise ConfigError(f"--host-experts is {self.host_experts}; expected 0 to 1")
        if len(names) > 1:
            raise ConfigError(
                "--host-experts and --expert-memory set the same thing; leave one out"
            )

    def rate(self, profile: "HardwareProfile") -> float:
        """Return the disk's rate in bytes per second; raises `ConfigError` if it is unknown."""
        if self.disk != _OF_PROFILE:
            return parse_bandwidth(str(self.disk), name="disk")
        if profile.disk is None:
            raise ConfigError(
                f"disk is 'profile', and {profile.name} has none; give a rate (--disk 2GB/s), or "
                "the file that tandem profile keeps as --hardware"
            )
        return profile.disk.most_bytes_per_second

    def share(self, costs: "ShapeCosts", *, has_device: bool) -> float:
        """Return the share of the experts that host slots hold.

        The share is --host-experts, or what fits into --expert-memory, computed as in loading.
        """
        if self.expert_memory is None:
            return _USUAL_SHARE if self.host_experts is None else self.host_experts
        from tandem.experts.cache.host_slots import share_of
        from tandem.policy.cost import whole_pages

        memory, layers = parse_bytes(self.expert_memory, name="expert_memory"), costs.num_moe_layers
        sizes = [whole_pages(costs.expert_bytes)] * layers
        counts = [costs.num_experts] * layers
        return share_of(memory, sizes, counts, has_device=has_device)


def simulate_disk(
    trace: "RoutingTrace",
    conditions: "Conditions",
    eviction: str,
    options: DiskOptions,
    progress: "Progress",
) -> "Report":
    """Replay one trace with experts on a disk and without a GPU; return the trace's report."""
    from tandem.experts.cache.policy_tables import host_slot_eviction
    from tandem.sim.disk import DiskConditions, simulate_over_disk
    from tandem.sim.simulation import split_trace
    from tandem.sim.systems import POLICIES

    costs = conditions.plain_costs(trace)
    on_disk = DiskConditions(
        costs=costs,
        bytes_per_second=options.rate(conditions.profile),
        share=options.share(costs, has_device=False),
        batch=conditions.batch,
        prompt=conditions.prompt,
        limit=conditions.limit,
    )
    replayed, _ = split_trace(trace, conditions.hold_out)
    make_eviction = host_slot_eviction(eviction, POLICIES.evictions)
    found = simulate_over_disk(replayed, on_disk, make_eviction, progress=progress)
    return found | {"hardware": conditions.profile.name, "eviction": eviction}


def with_disk(
    conditions: "Conditions", costs: "ShapeCosts", eviction: str, options: DiskOptions
) -> "Conditions":
    """Return `conditions` with all experts on a disk and a share of them in host slots."""
    from tandem.experts.cache.policy_tables import host_slot_eviction
    from tandem.policy.cost import DiskCosts, whole_pages
    from tandem.sim.disk import HostShare
    from tandem.sim.systems import POLICIES

    disk = DiskCosts(
        reads="direct",
        piece_bytes=whole_pages(costs.expert_bytes),
        depths=(1,),
        bytes_per_second=(options.rate(conditions.profile),),
    )
    memory = HostShare(
        share=options.share(costs, has_device=True),
        make_eviction=host_slot_eviction(eviction, POLICIES.evictions),
    )
    profile = replace(conditions.profile, disk=disk)
    return replace(conditions, profile=profile, memory=memory)


def print_disk_summary(path: str, result: "Report") -> None:
    """Print one trace's result as text."""
    rate, speed = result["disk_bytes_per_second"], result["decode_tokens_per_second"]
    print(
        f"{path}: {result['tokens']} tokens of {result['model']} on {result['hardware']}, "
        f"{format_bytes(result['slots_bytes'])} of memory for {result['host_experts']:.0%} of the "
        f"experts, a disk of {rate / 1e9:.2f} GB/s"
    )
    if speed is None:
        print("  no decode step within the limit")
    else:
        print(
            f"  decode {speed:.1f} tok/s, {result['time_over_bound']:.2f} of the bound's time; "
            f"{format_bytes(result['bytes_read_per_token'])} read a token, "
            f"{result['disk_share']:.0%} of the disk's rate"
        )
    print(
        f"  memory has {result['hit_rate']:.1%} of the experts that are used (with LRU "
        f"{result['lru_hit_rate']:.1%}, knowing the future {result['belady_hit_rate']:.1%})"
    )
