"""Prompt look-up: what followed the last time that the latest tokens stood in the context.

Saxena, "Prompt Lookup Decoding" (2023). Answers that quote, edit or summarise their prompt, and
code, repeat long parts of it; the context holds the conversation's earlier answers too.
"""

from collections.abc import Sequence

from tandem.policy.speculation.drafter import MOST_DRAFTED, Draft

# One token alone says too little, and where three stood before, so do most that four would find.
_SHORTEST, _LONGEST = 2, 3
# Matches of 4, 8 and 16 tokens are evidence of a higher kind each; drafted tokens that came true
# make a match longer.
_EVIDENCE = (4, 8, 16)


class PromptLookup:
    """Finds the latest place where the last two or three tokens stood before."""

    def __init__(self) -> None:
        """Know no sequence."""
        self._ends: dict[tuple[int, ...], int] = {}  # of each n-gram but the last, by its tokens
        self._num_known = 0

    def draft(self, tokens: Sequence[int]) -> Draft:
        """Return what followed the longest match; nothing where there is none."""
        self._learn(tokens)
        for size in range(min(_LONGEST, len(tokens) - 1), _SHORTEST - 1, -1):
            end = self._ends.get(tuple(tokens[-size:]))
            if end is not None:
                found, length = tokens[end : end + MOST_DRAFTED], _match_length(tokens, end)
                return Draft(found, [_evidence(length + place) for place in range(len(found))])
        return Draft((), ())

    def _learn(self, tokens: Sequence[int]) -> None:
        """Note where n-grams end that end before the last token."""
        for end in range(self._num_known + 1, len(tokens)):
            for size in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._ends[tuple(tokens[end - size : end])] = end
        self._num_known = max(self._num_known, len(tokens) - 1)


def _match_length(tokens: Sequence[int], end: int) -> int:
    """Return how many tokens before `end` are the sequence's last ones; more do not count."""
    length, most = 0, min(end, _EVIDENCE[-1])
    while length < most and tokens[end - 1 - length] == tokens[len(tokens) - 1 - length]:
        length += 1
    return length


def _evidence(length: int) -> int:
    """Return the kind of evidence that a match of so many tokens is."""
    return sum(length >= least for least in _EVIDENCE)
