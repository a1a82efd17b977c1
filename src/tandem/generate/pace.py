"""Decides how much of a prompt is computed between two tokens of streams, so that these keep
flowing.

Knows only the durations that the scheduler reports. A gap between two tokens of a stream is a
prefill chunk and a decode step. Chunks are as long as the gap allows, judging by the latest ones;
after a chunk follow as many decode steps as give streams their share of the time.
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


class Pace:
    """Limits the size of prefill chunks while other requests decode."""

    def __init__(self, max_gap_seconds: float, *, stream_share: float = 0.65) -> None:
        """Let streams wait at most `max_gap_seconds`; give them `stream_share` of the time."""
        self._max_gap_seconds = max_gap_seconds
        self._stream_share = stream_share
        self._decode_seconds = 0.0
        self._owed_seconds = 0.0  # seconds of decode steps that are due before the next chunk
        self._num_tokens = 0.0

    @property
    def may_prefill(self) -> bool:
        """Whether streams have had their share since the last chunk."""
        return self._owed_seconds <= 0

    def chunk_tokens(self, most: int) -> int:
        """Return how many prompt tokens are computed at once, at most `most`."""
        if self._num_tokens == 0:
            self._num_tokens = most / 4  # nothing is measured yet
        self._num_tokens = min(max(self._num_tokens, _LEAST_TOKENS), most)
        return int(self._num_tokens)

    def prefilled(
        self, num_tokens: int, seconds: float, *, part: float = 1.0, has_decoded: bool = False
    ) -> None:
        """Record a chunk's duration beside streams; shorter ones, at a prompt's end, count less.

        `part` is the streams' share of all running requests: each request has equal time if streams
        then have less. `has_decoded`: the chunk's forward also gave each stream a token.
        """
        share = min(self._stream_share, part)
        self._owed_seconds = seconds * share / (1 - share)
        if has_decoded:
            self._owed_seconds -= self._decode_seconds
        if seconds <= 0 or num_tokens < 0.5 * self._num_tokens:
            return
        room = self._max_gap_seconds - (0.0 if has_decoded else self._decode_seconds)
        wanted = max(room, _LEAST_SHARE * self._max_gap_seconds)
        change = min(max(wanted / seconds, 1 / _MOST_CHANGE), _MOST_CHANGE)
        self._num_tokens = num_tokens * change

    def decoded(self, seconds: float) -> None:
        """Record a decode step's duration; a slow one counts as a usual one, or half."""
        usual = self._decode_seconds or seconds
        self._owed_seconds -= max(min(seconds, usual), seconds / 2)
        newest = _NEWEST_IF_SLOW if seconds > usual else _NEWEST
        self._decode_seconds = usual + newest * (seconds - usual)
