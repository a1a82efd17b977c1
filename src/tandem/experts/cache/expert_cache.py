"""The expert cache of one device: slots, the copies into them, and the planner.

Slots, copy engine and planner use the same slot numbers, so a resize replaces all three. What the
planner's policies have learned is kept.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from tandem.experts.cache.clock import Clock
from tandem.experts.cache.copy_engine import CopyEngine
from tandem.experts.cache.policy_tables import NATIVE_TABLES
from tandem.experts.cache.sizing import OutOfDeviceMemoryError
from tandem.experts.cache.slots import MemoryPool, Slots
from tandem.experts.cache.start import fill_sets
from tandem.experts.store.host_store import HostStore
from tandem.policy.cost import HardwareProfile, ShapeCosts
from tandem.policy.plan import Copy, Geometry
from tandem.policy.planner import Planner
from tandem.policy.residency import READY
from tandem.policy.settings import PlannerSettings, make_planner_on
from tandem.policy.step_path import PLAIN_PATH, StepPath

# If a cache does not fit, the next attempt has this share of its slots.
SHRINK = 0.9

EngineMaker = Callable[[HostStore, Slots, Geometry, Clock], CopyEngine]


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """The costs of operations on this machine for this model."""

    profile: HardwareProfile
    shape: ShapeCosts
    path: StepPath = PLAIN_PATH
    """The path of decode steps; `shape` contains its host costs."""


class ExpertCache:
    """One device's slots, with their copy engine and planner; `resize` replaces all three."""

    def __init__(
        self,
        store: HostStore,
        device: MemoryPool,
        clock: Clock,
        geometry: Geometry,
        machine: Machine,
        settings: PlannerSettings,
        make_engine: EngineMaker,
    ) -> None:
        """Start without slots; `resize` allocates them."""
        self.store = store
        self.device = device
        self.clock = clock
        self.geometry = geometry
        self.machine = machine
        self.settings = settings
        self.slot_bytes = max(layer.image_bytes for layer in store)
        self._make_engine = make_engine
        self._under_way: set[tuple[int, int]] = set()
        self._is_closed = False
        self._install(0, (), None)

    def _install(self, num_slots: int, resident: Sequence[int], like: Planner | None) -> None:
        slots = Slots(self.device, num_slots, self.slot_bytes)
        self.engine = self._make_engine(self.store, slots, self.geometry, self.clock)
        self.planner = make_planner_on(
            self.machine.profile,
            self.machine.shape,
            self.settings,
            self.geometry,
            num_slots,
            resident=resident,
            like=like,
            tables=NATIVE_TABLES,
        )
        self._under_way.clear()
        slot_of = self.planner.residency.slot_of
        ids = [(*self.geometry.expert_id(key), slot_of[key]) for key in resident]
        self.engine.submit([Copy(*each, None) for each in ids], is_needed=True)
        self.engine.drain()

    @property
    def num_slots(self) -> int:
        """The present number of slots."""
        return self.engine.slots.num_slots

    def set_sizes(self, num_slots: int) -> list[int]:
        """Return the sizes that the planner's sets would have in a cache of `num_slots` slots."""
        return self.settings.set_sizes(self.geometry, num_slots)

    def resident(self) -> list[int]:
        """Return the keys of the ready experts that are not staged, lowest score first."""
        residency = self.planner.residency
        keys = [
            key
            for members in residency.members[: residency.staging]
            for key in members
            if residency.state[key] == READY
        ]
        scores = dict(zip(keys, self.planner.eviction.scores(keys), strict=True))
        return sorted(keys, key=lambda key: (scores[key], key))

    def resize(self, num_slots: int, resident: Sequence[int] | None = None) -> None:
        """Change the number of slots; the experts with the highest scores stay, as far as they fit.

        Must be called between steps. If `resident` (keys) is given, those experts fill the new
        slots instead. If the device lacks memory, the cache becomes as large as memory allows. If
        experts cannot be copied, the cache is left empty and the error is raised.
        """
        keep = self.resident()[::-1] if resident is None else resident  # highest score first
        planner = self.planner
        self.discard()
        while True:
            try:
                room = self.set_sizes(num_slots)
                self._install(num_slots, fill_sets(self.geometry, room, keep), planner)
                return
            except OutOfDeviceMemoryError:
                if num_slots == 0:
                    raise
                num_slots = int(num_slots * SHRINK)
            except BaseException:
                self.discard()
                self._install(num_slots, (), planner)
                raise

    def discard(self) -> None:
        """Free all slots and close the copy engine; unfinished copies are dropped."""
        with contextlib.suppress(Exception):  # errors of dropped copies have already been raised
            self.device.synchronize()
        self.engine.slots.forget_uses()
        self.engine.close()
        self.engine.slots.release()

    def close(self) -> None:
        """Free all slots and end all threads. May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self.discard()
            self.device.close()

    def submit(self, copies: Sequence[Copy], *, is_needed: bool) -> None:
        """Submit planned copies to the copy engine; unless a layer waits for them, flush it too."""
        self._under_way |= {(copy.layer, copy.expert) for copy in copies}
        self.engine.submit(copies, is_needed=is_needed)
        if copies and not is_needed:
            self.engine.flush()

    def tell_host(self) -> None:
        """Tell the host slots which experts are on the device; host slots evict these first."""
        slots = self.store.slots
        if slots is not None:
            slots.note_on_device(bytes(self.planner.residency.state))

    def take_arrivals(self) -> None:
        """Tell the planner which copies have ended."""
        for layer, expert, seconds in self.engine.arrivals():
            # Otherwise the copy belonged to an earlier cache.
            if (layer, expert) in self._under_way:
                self._under_way.discard((layer, expert))
                self.planner.copy_finished(layer, expert, seconds)

    def cancel_unused(self, layer: int, used: Sequence[int]) -> None:
        """Cancel the copies of a layer's experts outside `used`, except those that have begun."""
        stale = [e for at, e in self._under_way if at == layer and e not in used]
        if not stale:
            return
        residency = self.planner.residency
        for expert in self.engine.cancel(layer, stale):
            self._under_way.discard((layer, expert))
            self.planner.copy_finished(layer, expert, self.clock.now)
            residency.remove(self.geometry.key(layer, expert))
