"""Assertions that every plan and the tables of residents must satisfy."""

from tandem.policy.plan import ExpertId, LayerLoad, LayerPlan
from tandem.policy.residency import EMPTY, NOWHERE, Residency


def check_plan(load: LayerLoad, plan: LayerPlan) -> None:
    """Raise AssertionError unless the plan runs every active expert of the load exactly once."""
    runs = [*plan.gpu, *plan.arriving, *(copy.expert for copy in plan.fetch), *plan.cpu]
    assert sorted(runs) == list(load.experts), f"plan runs {sorted(runs)} of {load.experts}"
    evicted = {copy.evicts for copy in (*plan.fetch, *plan.insert, *plan.prefetch)}
    used = {ExpertId(load.layer, expert) for expert in load.experts}
    assert not evicted & used, f"plan evicts {evicted & used}, which its layer uses"


def check_integrity(found: Residency) -> None:
    """Raise AssertionError unless all tables agree with each other."""
    for set_id, members in enumerate(found.members):
        assert len(members) + len(found.free[set_id]) == found.capacity[set_id]
        for key in members:
            assert found.key_in[found.slot_of[key]] == key
            assert found.set_of_key[key] == set_id
            assert found.state[key] != EMPTY
    resident = [key for key, slot in enumerate(found.slot_of) if slot != NOWHERE]
    assert len(resident) == sum(map(len, found.members))
    free = [slot for slots in found.free for slot in slots]
    used = [found.slot_of[key] for key in resident]
    assert sorted([*free, *used, *found.lent]) == list(range(found.num_slots))
