"""Prompt look-up: drafts the tokens that followed an earlier occurrence of the latest tokens.

Saxena, "Prompt Lookup Decoding" (2023). Answers that quote, edit or summarise their prompt repeat
long parts of it, and so does code. The context to search includes the conversation's earlier
answers. Kept answers to other requests are searched too.
"""

from collections import deque
from collections.abc import Sequence

from tandem.policy.speculation.drafter import MOST_DRAFTED, Draft

# One token alone says too little, and three find most of what four would find.
_SHORTEST, _LONGEST = 2, 3
# Longer matches (4, 8, 16 tokens) are stronger kinds of evidence. Accepted tokens make a match
# longer.
_EVIDENCE = (4, 8, 16)
# Matches in answers to other requests are separate kinds of evidence.
_ELSEWHERE = len(_EVIDENCE) + 1
# Tokens of earlier answers that are kept; with their index 10 MB.
_KEPT_TOKENS = 1 << 15


class EarlierAnswers:
    """The latest answers given to `add`; any three consecutive tokens can be looked up."""

    def __init__(self, most_tokens: int = _KEPT_TOKENS) -> None:
        """Keep at most `most_tokens` tokens."""
        self._most_tokens, self._num_tokens = most_tokens, 0
        self._answers: deque[tuple[int, ...]] = deque()
        self._ends: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}

    def add(self, tokens: Sequence[int]) -> None:
        """Keep an answer, or its beginning; the oldest answers are dropped to make room."""
        answer = tuple(tokens[: self._most_tokens])
        if len(answer) <= _LONGEST:
            return
        while self._num_tokens + len(answer) > self._most_tokens:
            self._drop_oldest()
        self._answers.append(answer)
        self._num_tokens += len(answer)
        for end in range(_LONGEST, len(answer)):
            self._ends[answer[end - _LONGEST : end]] = answer, end

    def find(self, tokens: Sequence[int]) -> tuple[Sequence[int], int]:
        """Return the latest kept answer with the last three of `tokens`, and where they end in it.

        Returns ((), 0) if no kept answer has them.
        """
        return self._ends.get(tuple(tokens[-_LONGEST:]), ((), 0))

    def _drop_oldest(self) -> None:
        oldest = self._answers.popleft()
        self._num_tokens -= len(oldest)
        for end in range(_LONGEST, len(oldest)):
            key = oldest[end - _LONGEST : end]
            if key in self._ends and self._ends[key][0] is oldest:
                del self._ends[key]


class PromptLookup:
    """Finds the latest earlier occurrence of the last two or three tokens."""

    def __init__(self, earlier: EarlierAnswers | None = None) -> None:
        """Start without tokens; `end` will add this answer to the kept answers in `earlier`."""
        self._earlier = earlier
        # N-gram of tokens -> its latest end, without the last n-gram.
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_known = 0
        self._tokens: Sequence[int] = ()
        self._answer_begin = 0

    def draft(self, tokens: Sequence[int]) -> Draft:
        """Return the tokens that followed the longest match; an empty draft if there is none."""
        if not self._num_known:
            self._answer_begin = len(tokens) - 1
        self._tokens = tokens
        self._learn(tokens)
        end, length = self._found(tokens)
        if self._earlier is not None and length < _EVIDENCE[-1]:
            answer, place = self._earlier.find(tokens)
            elsewhere = _match_length(tokens, answer, place)
            if elsewhere > length:
                return _draft(answer, place, elsewhere, _ELSEWHERE)
        return _draft(tokens, end, length, 0) if end else Draft((), ())

    def end(self) -> None:
        """Add the answer to the kept answers in `earlier`, if given, for later requests."""
        if self._earlier is not None:
            self._earlier.add(self._tokens[self._answer_begin :])

    def _found(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the end of an earlier match of the last tokens, and its length; or (0, 0)."""
        for size in range(min(_LONGEST, len(tokens) - 1), _SHORTEST - 1, -1):
            end = self._ends.get(tuple(tokens[-size:]))
            if end is not None:
                return end, _match_length(tokens, tokens, end)
        return 0, 0

    def _learn(self, tokens: Sequence[int]) -> None:
        """Record the ends of all n-grams, except those that end with the last token."""
        for end in range(self._num_known + 1, len(tokens)):
            for size in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._ends[tuple(tokens[end - size : end])] = end
        self._num_known = max(self._num_known, len(tokens) - 1)


def _match_length(tokens: Sequence[int], text: Sequence[int], end: int) -> int:
    """Return how many tokens before `end` equal the last of `tokens`, up to a limit."""
    length, most = 0, min(end, len(tokens), _EVIDENCE[-1])
    while length < most and text[end - 1 - length] == tokens[len(tokens) - 1 - length]:
        length += 1
    return length


def _draft(text: Sequence[int], end: int, length: int, first_kind: int) -> Draft:
    """Return a draft of the tokens after a match of `length` tokens, which ends at `end` in `text`.

    Groups begin with `first_kind`; a longer match is of a higher group.
    """
    found = text[end : end + MOST_DRAFTED]
    lengths = range(length, length + len(found))
    return Draft(found, [first_kind + sum(n >= least for least in _EVIDENCE) for n in lengths])
