"""What stays on the GPU and what may enter: one protocol, one file per policy, names in order."""

from tandem.core.registry import Registry
from tandem.policy.eviction.copy_on_miss import CopyOnMiss
from tandem.policy.eviction.dali_window import DaliWindow
from tandem.policy.eviction.decayed import Decayed
from tandem.policy.eviction.fifo import Fifo
from tandem.policy.eviction.hybrimoe import HybriMoeScore
from tandem.policy.eviction.lfu import Lfu
from tandem.policy.eviction.lru import Lru
from tandem.policy.eviction.next_use import NextUse
from tandem.policy.eviction.policy import Eviction
from tandem.policy.eviction.static import Static

__all__ = ["EVICTIONS", "Eviction"]

EVICTIONS: Registry[Eviction] = Registry("eviction")
EVICTIONS.register("successor")(NextUse)
EVICTIONS.register("lru")(Lru)
EVICTIONS.register("fifo")(Fifo)
EVICTIONS.register("lfu")(Lfu)
EVICTIONS.register("decayed")(Decayed)
EVICTIONS.register("dali-window")(DaliWindow)
EVICTIONS.register("hybrimoe")(HybriMoeScore)
EVICTIONS.register("copy-on-miss")(CopyOnMiss)
EVICTIONS.register("static")(Static)
