"""Drops the oldest turns of a conversation until it fits a context; separates images from text.

Knows roles and turns; the caller knows lengths and limits.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

M = TypeVar("M", bound=Mapping[str, object])

_INSTRUCTION_ROLES = ("system", "developer")


def trim_conversation(
    messages: Sequence[M], fits: Callable[[list[M]], bool]
) -> tuple[list[M], int]:
    """Return the kept messages, and how many of the oldest turns were dropped.

    A turn is a user's messages and all replies to them, tool messages included. Leading system and
    developer messages and the last turn are always kept, even if they alone do not fit. `fits` must
    be monotonic: if a list of messages fits, it must also fit with fewer turns.
    """
    num_leading = _count_leading_instructions(messages)
    leading = list(messages[:num_leading])
    starts = _turn_starts(messages, num_leading)

    def without(num_turns: int) -> list[M]:
        return leading + list(messages[starts[num_turns] :])

    if len(starts) < 2 or fits(list(messages)):
        return list(messages), 0
    # `fits` tokenizes all remaining messages, so long conversations are bisected.
    candidates = range(1, len(starts) - 1)
    num_dropped = 1 + bisect_left(candidates, True, key=lambda count: fits(without(count)))
    return without(num_dropped), num_dropped


def without_images(
    messages: Sequence[Mapping[str, object]],
) -> tuple[list[dict[str, object]], list[Any]]:
    """Return a conversation with placeholders for its images, and the images."""
    turns, images = [], []
    for message in messages:
        turn = dict(message)
        if isinstance(content := turn.get("content"), list):
            images += [part["image"] for part in content if _is_image(part)]
            turn["content"] = [{"type": "image"} if _is_image(part) else part for part in content]
        turns.append(turn)
    return turns, images


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _count_leading_instructions(messages: Sequence[Mapping[str, object]]) -> int:
    others = (i for i, m in enumerate(messages) if m.get("role") not in _INSTRUCTION_ROLES)
    return next(others, len(messages))


def _turn_starts(messages: Sequence[Mapping[str, object]], num_leading: int) -> list[int]:
    """Return the indices at which turns begin: user messages that do not follow a user message.

    Messages before the first user message (such as a greeting) are a turn, too.
    """
    roles = [message.get("role") for message in messages]
    return [
        idx
        for idx in range(num_leading, len(messages))
        if idx == num_leading or (roles[idx] == "user" and roles[idx - 1] != "user")
    ]
