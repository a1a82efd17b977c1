"""An eviction policy of one's own: an expert gets a slot at its second miss, not at its first.

It is compared with others on a recorded routing trace, without a model:

    python examples/own_policy.py data/traces/deepseek-v2-lite.npz

With --model it then runs live, on the simulated GPU on the CPU.
"""

import argparse
from collections.abc import Sequence

import tandem
from tandem.hardware.profiles import load_profile
from tandem.policy.eviction import EVICTIONS
from tandem.policy.eviction.baselines import Lru
from tandem.policy.plan import Geometry
from tandem.policy.settings import PlannerSettings
from tandem.sim.simulation import Conditions, simulate
from tandem.trace import read_trace


class SecondMiss(Lru):
    """Least recently used, but an expert that was missed once may be a stray and must wait."""

    def __init__(self, geometry: Geometry) -> None:
        """Start with nothing missed."""
        super().__init__(geometry)
        self._missed: set[int] = set()

    def candidates(
        self, layer: int, misses: Sequence[int], slot_of: Sequence[int]
    ) -> Sequence[int]:
        """Return the experts that have been missed before."""
        again = [key for key in misses if key in self._missed]
        self._missed.update(misses)
        return again

    def inserted(self, key: int) -> None:
        """Count an expert's misses again from the start once it has had a slot."""
        self._missed.discard(key)


EVICTIONS.register("second-miss")(SecondMiss)  # from here on every option takes the name


def main() -> None:
    """Simulate three policies, then run the new one if there is a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", help="a routing trace (.npz)")
    parser.add_argument("--tokens", type=int, default=400, help="tokens to replay")
    parser.add_argument("--model", help="a checkpoint directory")
    parser.add_argument("--gpu-memory", default="auto", help="of the simulated GPU")
    flags = parser.parse_args()

    trace = read_trace(flags.trace)
    conditions = Conditions(
        profile=load_profile("desktop-12gb"), gpu_experts=0.25, limit=flags.tokens
    )
    for name in ("lru", "second-miss", "next-use"):
        found = simulate(trace, PlannerSettings(eviction=name), conditions)
        speed = found["decode_tokens_per_second"] or 0.0
        print(f"{name}: hit rate {found['hit_rate']:.1%}, {speed:.1f} tok/s (simulated)")
    if flags.model is not None:
        model = tandem.load(
            flags.model,
            device="emulated",
            gpu_memory=flags.gpu_memory,
            profile="desktop-12gb",
            eviction="second-miss",
        )
        answers = tandem.Generator(model).generate([[5, 6, 7]], max_new_tokens=8)
        print(f"live: {answers[0].token_ids}")


if __name__ == "__main__":
    main()
