"""Decides how many prompt tokens are computed between two tokens of the streams of tokens.

Here a stream is a stream of tokens, and the gap is the time between two of its tokens: the duration
of a prefill chunk and a decode step. A chunk is as long as the largest permitted gap allows, judged
by the durations of the latest chunks. After a chunk, enough decode steps must follow to give
streams their share of the time. All durations come from the scheduler.
"""

# Weight of the latest decode step in the usual duration. A slow step counts less: the first ones
# after a chunk are slow because the chunk has filled the CPU's caches. With these weights streams
# get more than their share of the time, and keep about 60 % of their rate.
_NEWEST, _NEWEST_IF_SLOW = 0.2, 0.02
_LEAST_TOKENS = 16
# The largest factor by which a chunk grows or shrinks, since a single measurement may be an
# outlier.
_MOST_CHANGE = 2.0
# The share of the gap that a chunk gets even if decode steps alone fill the gap.
_LEAST_SHARE = 0.25
# What the chunks before count beside the latest one, each time.
_KEPT = 0.8
# Chunks that differ less in length say nothing about the costs of a token (a coefficient of
# variation).
_LEAST_SPREAD = 0.1


class ChunkCosts:
    """Estimates a chunk's seconds as a fixed cost and a cost per token.

    The fixed cost is large where a few tokens read most experts, so that a shorter chunk saves
    little. The estimate is by least squares over the latest chunks.
    """

    def __init__(self) -> None:
        """Start without a recorded chunk."""
        self._sums = [0.0] * 5  # of weights, n, seconds, n * n, n * seconds

    def note(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of a chunk of `num_tokens` tokens; earlier chunks then count less."""
        terms = (1.0, num_tokens, seconds, num_tokens * num_tokens, num_tokens * seconds)
        self._sums = [_KEPT * old + new for old, new in zip(self._sums, terms, strict=True)]

    def tokens_within(self, seconds: float, part: float) -> float:
        """Return the number of tokens of a chunk that takes `seconds`.

        At least one chunk must have been recorded. If the fixed cost leaves time for fewer than
        `_LEAST_TOKENS` tokens, the chunk takes longer: its tokens take as long as the fixed cost,
        or r times as long if r > 1 prompts run per stream. `part` is the number of streams over the
        number of running requests.
        """
        weight, tokens, total, squares, products = self._sums
        mean_tokens, mean_seconds = tokens / weight, total / weight
        variance = squares / weight - mean_tokens**2
        per_token = mean_seconds / mean_tokens
        if variance > (_LEAST_SPREAD * mean_tokens) ** 2:
            slope = (products / weight - mean_tokens * mean_seconds) / variance
            per_token = min(max(slope, 0.01 * per_token), per_token)
        fixed = mean_seconds - per_token * mean_tokens
        room = seconds - fixed
        if room < _LEAST_TOKENS * per_token:
            room = fixed * max(1.0, (1 - part) / part)
        return room / per_token


class Pace:
    """Limits the size of prefill chunks while other requests decode."""

    def __init__(self, max_gap_seconds: float, *, stream_share: float = 0.65) -> None:
        """Let streams wait at most `max_gap_seconds`; give them `stream_share` of the time."""
        self._max_gap_seconds = max_gap_seconds
        self._stream_share = stream_share
        self._decode_seconds = 0.0
        self._owed_seconds = 0.0  # seconds of decode steps that are due before the next chunk
        self._num_tokens = 0.0
        self._costs = ChunkCosts()

    @property
    def may_prefill(self) -> bool:
        """Whether a chunk may run: streams have had their share of time since the last chunk."""
        return self._owed_seconds <= 0

    def chunk_tokens(self, most: int) -> int:
        """Return the size of the next chunk in tokens, at most `most`."""
        if self._num_tokens == 0:
            self._num_tokens = most / 4  # nothing is measured yet
        self._num_tokens = min(max(self._num_tokens, _LEAST_TOKENS), most)
        return int(self._num_tokens)

    def prefilled(
        self, num_tokens: int, seconds: float, *, part: float = 1.0, has_decoded: bool = False
    ) -> None:
        """Record a chunk's duration.

        `part` is the number of streams over the number of running requests. If it is 0, only the
        estimates of a chunk's duration change. If `part` is less than `stream_share`, streams get
        `part` of the time, so that all requests get equal time. `has_decoded` tells whether the
        chunk's forward also gave each stream a token.
        """
        if num_tokens > 0 and seconds > 0:
            self._costs.note(num_tokens, seconds)
        if part == 0:
            return
        share = min(self._stream_share, part)
        self._owed_seconds = seconds * share / (1 - share)
        if has_decoded:
            self._owed_seconds -= self._decode_seconds
        if seconds <= 0 or num_tokens < 0.5 * self._num_tokens:
            return
        room = self._max_gap_seconds - (0.0 if has_decoded else self._decode_seconds)
        target = self._costs.tokens_within(max(room, _LEAST_SHARE * self._max_gap_seconds), part)
        change = min(max(target / num_tokens, 1 / _MOST_CHANGE), _MOST_CHANGE)
        self._num_tokens = num_tokens * change

    def decoded(self, seconds: float) -> None:
        """Record a decode step's duration.

        The duration counts towards the streams' share of the time. A slow step counts as a usual
        step, or as half its own duration if that is more.
        """
        usual = self._decode_seconds or seconds
        self._owed_seconds -= max(min(seconds, usual), seconds / 2)
        newest = _NEWEST_IF_SLOW if seconds > usual else _NEWEST
        self._decode_seconds = usual + newest * (seconds - usual)
