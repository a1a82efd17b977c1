"""Which predicted experts are copied ahead: one protocol, one file per choice, names in order."""

from tandem.core.registry import Registry
from tandem.policy.prefetch.nothing import Nothing
from tandem.policy.prefetch.pays import Pays
from tandem.policy.prefetch.policy import PrefetchChoice, PrefetchTerms
from tandem.policy.prefetch.top_k import TopK

__all__ = ["PREFETCHES", "PrefetchChoice", "PrefetchTerms"]

PREFETCHES: Registry[PrefetchChoice] = Registry("prefetch choice")
PREFETCHES.register("pays")(Pays)
PREFETCHES.register("top-k")(TopK)
PREFETCHES.register("none")(Nothing)
