"""Changes to a token's scores before sampling: penalties, grammars, minimum lengths.

Each object belongs to one answer.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

from torch import Tensor

from tandem.core.errors import ConfigError
from tandem.foreign_types import Tokenizer
from tandem.generate.request import Request
from tandem.generate.sampling import SamplingOptions
from tandem.generate.thinking import BoundedThinking

# Added to the score of a token that may not come yet. It is finite so that a grammar that allows
# only this token still gets it.
_LAST_RESORT = -1e9


class Constraint(Protocol):
    """Limits which tokens may come next in an answer; for example, a grammar."""

    def restrict(self, scores: Tensor) -> Tensor:
        """Return changed scores (1, vocabulary), with -inf for forbidden tokens."""

    def accept(self, token: int) -> bool:
        """Record the sampled token; return whether the answer must end."""


FollowGrammar = Callable[[str], Constraint]
"""Returns a constraint that makes an answer follow a grammar."""


def no_grammars(grammar: str) -> Constraint:
    """Raise `ConfigError` for any grammar; the default where grammars are not supported."""
    raise ConfigError("grammars are followed by `tandem serve` alone; leave the grammar out")


def constraints_of(
    request: Request,
    end_ids: frozenset[int],
    tokenizer: Tokenizer | None,
    follow_grammar: FollowGrammar,
) -> Iterator[Constraint]:
    """Yield the constraints of a request's answer, in the order in which they change scores."""
    options = request.options
    if options.min_tokens:
        yield NotYet(options.min_tokens, end_ids)
    if options.presence_penalty or options.frequency_penalty or options.logit_bias:
        yield PenalisedScores(options)
    if request.grammar is not None:
        yield follow_grammar(request.grammar)
    if request.thinking is not None:
        assert tokenizer is not None
        yield BoundedThinking(request.thinking, tokenizer)


class PenalisedScores:
    """Applies penalties and biases of OpenAI's API; penalties count only the answer's tokens."""

    def __init__(self, options: SamplingOptions) -> None:
        """Take the penalties and biases from `options`; no token is counted yet."""
        self._options = options
        self._counts: Counter[int] = Counter()

    def restrict(self, scores: Tensor) -> Tensor:
        """Return scores (1, vocabulary) in fp32, with penalties subtracted and biases added."""
        options, added = self._options, dict(self._options.logit_bias)
        for token, count in self._counts.items():
            penalty = options.presence_penalty + count * options.frequency_penalty
            added[token] = added.get(token, 0.0) - penalty
        changed = scores.float().clone()
        changed[0, list(added)] += changed.new_tensor(list(added.values()))
        return changed

    def accept(self, token: int) -> bool:
        """Count the sampled token; return False, because the answer need not end."""
        self._counts[token] += 1
        return False


class NotYet:
    """Keeps an answer from ending before it has `min_tokens` tokens."""

    def __init__(self, min_tokens: int, end_ids: frozenset[int]) -> None:
        """Take the least number of tokens, and `end_ids`, the tokens that would end the answer."""
        self._num_missing = min_tokens
        self._end_ids = sorted(end_ids)

    def restrict(self, scores: Tensor) -> Tensor:
        """Return scores (1, vocabulary); while the answer is too short, end tokens get 1e9 less."""
        if self._num_missing <= 0 or not self._end_ids:
            return scores
        changed = scores.float().clone()
        changed[0, self._end_ids] += _LAST_RESORT
        return changed

    def accept(self, token: int) -> bool:
        """Count the sampled token; return False, because the answer need not end."""
        self._num_missing -= 1
        return False
