"""Every choice of policies, size and batch against the CPU alone: python -m tests.offload.matrix"""

import itertools
import sys

import torch

from tandem.policy.eviction import EVICTIONS
from tandem.policy.prediction import PREDICTIONS
from tandem.policy.prefetch import PREFETCHES
from tests.offload.machines import make_store
from tests.offload.test_hybrid_executor import BATCHES, POLICIES, SLOTS, check_equal, settings_of


def main() -> int:
    torch.set_num_threads(1)
    store = make_store()
    names = list(
        itertools.product(POLICIES, EVICTIONS.names(), PREDICTIONS.names(), PREFETCHES.names())
    )
    for done, policies in enumerate(names, 1):
        for num_slots, batch in itertools.product(SLOTS, BATCHES):
            check_equal(store, settings_of(*policies), num_slots, batch)
        print(f"\r{done} of {len(names)} choices of policies", end="", flush=True)
    print(f"\nall equal: {len(names) * len(SLOTS) * len(BATCHES)} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
