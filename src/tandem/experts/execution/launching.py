"""Launches one layer's experts on a device in batches, in the order in which they arrive.

    residents -> experts that are arriving -> a group of fetched experts, once copied -> the next...

Copies of a group are submitted before the device gets what precedes the group, so that the link
stays busy while the device computes. A group uses at most half of the ring's slots. Residents come
first: they run while the first copies are under way, and no other order ends earlier. They are one
batch, because each launch costs the host a tenth of a millisecond or more.
"""

from collections.abc import Iterator, Sequence

from tandem.experts.cache.expert_cache import ExpertCache
from tandem.experts.execution.batch import CallSide
from tandem.experts.execution.device import Device
from tandem.experts.execution.layer_call import LayerCall
from tandem.policy.cost import FETCHES_A_LAUNCH
from tandem.policy.plan import Copy, LayerPlan


def launch(
    cache: ExpertCache, device: Device, call: LayerCall, plan: LayerPlan, side: CallSide
) -> None:
    """Launch the device's share of a plan in batches, and submit its fetches.

    The experts of `call` must be in the plan's launch order.
    """
    order, slot_of = plan.in_launch_order(), cache.planner.residency.slot_of
    first = plan.layer * cache.geometry.num_experts

    def run(begin: int, end: int, slots: Sequence[int]) -> None:
        keys = [first + expert for expert in order[begin:end]]
        use = cache.engine.use(slots or [slot_of[key] for key in keys], keys)
        device.launch(call.batch(begin, end, side), use)

    num_residents, most = len(plan.gpu), max(1, min(FETCHES_A_LAUNCH, cache.planner.ring.size // 2))
    groups = _groups(plan.fetch, most)
    group = next(groups, ())
    if group:
        cache.submit(group, is_needed=True)
    at = num_residents + len(plan.arriving)
    if num_residents:
        run(0, num_residents, ())
    for begin in range(num_residents, at, most):
        run(begin, min(begin + most, at), ())
    while group:
        run(at, at + len(group), [copy.slot for copy in group])
        at, group = at + len(group), next(groups, ())
        if group:
            cache.submit(group, is_needed=True)


def _groups(copies: Sequence[Copy], most: int) -> Iterator[Sequence[Copy]]:
    """Yield the copies in order, in groups of at most `most` copies to different slots."""
    group: list[Copy] = []
    for copy in copies:
        if len(group) == most or any(copy.slot == other.slot for other in group):
            yield group
            group = []
        group.append(copy)
    if group:
        yield group
