"""Compares every combination of policies with the CPU alone: python -m tests.experts.matrix"""

import itertools
import sys

import torch

from tandem.policy.assignment import ASSIGNMENTS
from tandem.policy.eviction import EVICTIONS
from tandem.sim.systems import POLICIES
from tests.experts.machines import make_store
from tests.experts.test_hybrid_executor import BATCHES, SLOTS, check_equal, settings_of


def main() -> int:
    torch.set_num_threads(1)
    store = make_store()
    names = (
        ASSIGNMENTS.names(),
        EVICTIONS.names(),
        POLICIES.predictions.names(),
        POLICIES.prefetches.names(),
    )
    # Without a prediction nothing is prefetched, and vice versa: those are equal.
    choices = dict.fromkeys(itertools.starmap(settings_of, itertools.product(*names)))
    for done, settings in enumerate(choices, 1):
        for num_slots, batch in itertools.product(SLOTS, BATCHES):
            check_equal(store, settings, num_slots, batch)
        print(f"\r{done} of {len(choices)} choices of policies", end="", flush=True)
    print(f"\nall equal: {len(choices) * len(SLOTS) * len(BATCHES)} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
