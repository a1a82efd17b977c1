"""Which experts stay on the GPU and which may enter: one protocol, and its policies by name."""

from tandem.core.registry import Registry
from tandem.policy.eviction import baselines
from tandem.policy.eviction.next_use import NextUse
from tandem.policy.eviction.policy import Eviction

__all__ = ["EVICTIONS", "IN_HOST_SLOTS", "Eviction"]

IN_HOST_SLOTS = ("next-use", "lru")
"""The policies that host slots may follow: native code implements them."""

EVICTIONS: Registry[Eviction] = Registry("eviction")
EVICTIONS.register("next-use", formerly="successor")(NextUse)
EVICTIONS.register("lru")(baselines.Lru)
EVICTIONS.register("fifo")(baselines.Fifo)
EVICTIONS.register("lfu")(baselines.Lfu)
EVICTIONS.register("decayed")(baselines.Decayed)
EVICTIONS.register("dali-window")(baselines.DaliWindow)
EVICTIONS.register("hybrimoe")(baselines.HybriMoeScore)
EVICTIONS.register("copy-on-miss")(baselines.CopyOnMiss)
EVICTIONS.register("static")(baselines.Static)
