"""Launches one layer's experts on a device in batches, in the order in which they arrive.

    some residents -> a group of fetched experts, once copied -> more residents -> the next group...

Copies of a group are submitted before the group is launched, so that the link stays busy while the
device computes. A group uses at most half of the ring's slots. Residents are spread among the
groups: they run while the device would otherwise wait for the link.
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
    arriving = range(num_residents, num_residents + len(plan.arriving))
    groups = list(_groups(plan.fetch, most))
    waits = -(-len(arriving) // most) + len(groups)
    share = -(-num_residents // max(1, waits))
    done, at = 0, arriving.stop

    def fill() -> None:
        nonlocal done
        if done < num_residents:
            run(done, min(num_residents, done + share), ())
            done += share

    for begin in range(arriving.start, arriving.stop, most):
        fill()
        run(begin, min(begin + most, arriving.stop), ())
    for group in groups:
        cache.submit(group, is_needed=True)
        fill()
        run(at, at + len(group), [copy.slot for copy in group])
        at += len(group)
    fill()


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
