"""Which expert is in which GPU slot: tags, states and sets. Bookkeeping only, no decisions.

All slots are equal and numbered. A *set* is a group of slots that one layer has or all layers
share: one set per layer is paper 2's set-associative cache (layer = index, slots = ways) and DALI's
per-layer cache; one set for all layers is a single pool. A further set, `staging`, holds experts
that are fetched for one use or prefetched. `adopt` exchanges slots between sets; a set's size is
constant except for slots that it has lent (`tandem.policy.ring`).
"""

from collections.abc import Container, Sequence

from tandem.core.errors import ConfigError
from tandem.policy.plan import Copy, Geometry

EMPTY, COPYING, READY = 0, 1, 2
NOWHERE = -1


def sets_by_layer(num_slots: int, num_layers: int) -> list[int]:
    """Return each layer's number of slots: equal, but the first layers may have one more."""
    ways, more = divmod(num_slots, num_layers)
    return [ways + (layer < more) for layer in range(num_layers)]


class Residency:
    """Slots of the expert cache, addressed by expert key (see `Geometry.key`)."""

    def __init__(self, geometry: Geometry, set_sizes: Sequence[int], staging_slots: int) -> None:
        """Create one set per entry of `set_sizes` (one per layer, or a single one), all empty."""
        if len(set_sizes) not in (1, geometry.num_layers):
            raise ConfigError(
                f"{len(set_sizes)} cache sets for {geometry.num_layers} layers; "
                "expected one set per layer or a single one"
            )
        self.geometry = geometry
        self.num_sets = len(set_sizes)
        self.staging = self.num_sets
        self.capacity = [*set_sizes, staging_slots]
        self.num_slots = sum(self.capacity)
        num_keys = geometry.num_layers * geometry.num_experts
        self.slot_of = [NOWHERE] * num_keys
        self.state = bytearray(num_keys)
        self.set_of_key = bytearray(num_keys) if self.num_sets < 255 else [0] * num_keys
        self.key_in = [NOWHERE] * self.num_slots
        self.members: list[list[int]] = [[] for _ in self.capacity]
        self.free: list[list[int]] = []
        self.lent: dict[int, int] = {}  # slot -> its set
        first = 0
        for size in self.capacity:
            self.free.append(list(range(first + size - 1, first - 1, -1)))
            first += size

    def set_of(self, layer: int) -> int:
        """Return the number of the set that holds a layer's experts."""
        return layer if self.num_sets > 1 else 0

    def has_every_expert(self) -> bool:
        """Tell whether every expert of the model is ready, and none of them in a staging slot."""
        return not self.members[self.staging] and self.state.count(READY) == len(self.state)

    def insert(self, key: int, set_id: int) -> int:
        """Assign a free slot of the set to an absent expert as COPYING; return the slot."""
        assert self.slot_of[key] == NOWHERE, f"expert {key} is resident"
        slot = self.free[set_id].pop()
        self.slot_of[key] = slot
        self.state[key] = COPYING
        self.key_in[slot] = key
        self.set_of_key[key] = set_id
        self.members[set_id].append(key)
        return slot

    def remove(self, key: int) -> int:
        """Free the slot of a ready expert, and return the slot."""
        assert self.state[key] == READY, f"expert {key} is not ready: state {self.state[key]}"
        set_id = self.set_of_key[key]
        slot = self.slot_of[key]
        self.slot_of[key] = NOWHERE
        self.state[key] = EMPTY
        self.key_in[slot] = NOWHERE
        self.members[set_id].remove(key)
        self.free[set_id].append(slot)
        return slot

    def adopt(self, key: int, set_id: int) -> None:
        """Move a staged expert into another set without a copy.

        The expert's slot becomes one of set `set_id`; a free slot of that set, which must exist,
        becomes a staging slot.
        """
        assert self.set_of_key[key] == self.staging, f"expert {key} is not staged"
        spare = self.free[set_id].pop()
        self.free[self.staging].append(spare)
        self.members[self.staging].remove(key)
        self.members[set_id].append(key)
        self.set_of_key[key] = set_id

    def lend(self, set_id: int) -> int:
        """Lend a free slot of a set, which then has one slot less; return the slot."""
        slot = self.free[set_id].pop()
        self.capacity[set_id] -= 1
        self.lent[slot] = set_id
        return slot

    def take_back(self) -> None:
        """Return all lent slots to their sets."""
        for slot, set_id in self.lent.items():
            self.capacity[set_id] += 1
            self.free[set_id].append(slot)
        self.lent.clear()

    def copy_of(self, key: int, slot: int, victim: int) -> Copy:
        """Return the copy of an expert into a slot that `victim`, a key or NOWHERE, has left."""
        expert_id = self.geometry.expert_id
        return Copy(*expert_id(key), slot, None if victim == NOWHERE else expert_id(victim))

    def finish(self, key: int) -> None:
        """Mark an expert's copy as complete."""
        assert self.state[key] == COPYING, f"expert {key} is not being copied"
        self.state[key] = READY

    def release_passed(self, layer: int, in_use: Container[int]) -> list[int]:
        """Free the slots of staged experts of layers before `layer`, if ready and not `in_use`.

        Returns the keys of these experts.
        """
        experts, left = self.geometry.num_experts, []
        for key in [*self.members[self.staging]]:
            passed = key // experts < layer and key not in in_use
            if passed and self.state[key] == READY:
                self.remove(key)
                left.append(key)
        return left
