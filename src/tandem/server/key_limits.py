"""Limits on the requests of each API key, and the log of their use."""

import asyncio
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tandem.apis.errors import ApiError, busy
from tandem.core.errors import ConfigError
from tandem.server.options import ServerOptions

_log = logging.getLogger("tandem.server")
_NAME_BYTES = 4


@dataclass
class _Key:
    """An API key's remaining tokens, running answers and waiting answers."""

    tokens: float
    """Tokens left for the key; below 0 after an answer longer than the remainder."""
    counted: float
    """The time of the last update of `tokens`, in seconds."""
    running: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)

    @property
    def num_waiting(self) -> int:
        return sum(number for number, _ in self.waiting)


class KeyLimits:
    """Delays or refuses answers that would exceed the limits of their API key; None is no limit.

    Tokens are a bucket: a key begins with the tokens of one minute and regains them at that rate.
    The tokens of a request's prompts and answers are subtracted when the request ends, so the last
    request may exceed the remaining tokens.
    """

    def __init__(self, options: ServerOptions, clock: Callable[[], float] = time.monotonic) -> None:
        """Store the limits of `--key-running`, `--key-waiting` and `--key-tokens-per-minute`."""
        self._most_running = options.key_running
        self._most_waiting = (
            options.max_waiting if options.key_waiting is None else options.key_waiting
        )
        self._tokens_a_minute = options.key_tokens_per_minute
        self._clock = clock
        self._keys: dict[bytes, _Key] = {}

    async def enter(self, owner: bytes, number: int) -> None:
        """Wait until the key may begin `number` answers; the caller must call `leave` afterwards.

        Raises `ApiError`: 400 for more answers than may ever run together; 429 if too many answers
        wait, or if the key's tokens are used up.
        """
        key = self._key(owner)
        self._require_tokens(key)
        if self._most_running is None or (self._fits(key, number) and not key.waiting):
            key.running += number
            return
        self._require_place(key, number)
        place = (number, asyncio.get_running_loop().create_future())
        key.waiting.append(place)
        try:
            await place[1]
        except asyncio.CancelledError:
            if place in key.waiting:
                key.waiting.remove(place)
            else:  # it was admitted meanwhile
                key.running -= number
            self._let_in(key)
            raise

    def leave(self, owner: bytes, number: int, num_tokens: int) -> None:
        """Count `number` answers as ended; charge the key for their tokens, prompts included."""
        key = self._key(owner)
        key.running -= number
        key.tokens -= num_tokens
        self._let_in(key)

    def _key(self, owner: bytes) -> _Key:
        """Return a key's state, including the tokens that it has regained since the last update."""
        most, now = float(self._tokens_a_minute or 0), self._clock()
        key = self._keys.setdefault(owner, _Key(most, now))
        key.tokens = min(most, key.tokens + (now - key.counted) * most / 60)
        key.counted = now
        return key

    def _fits(self, key: _Key, number: int) -> bool:
        return self._most_running is None or key.running + number <= self._most_running

    def _require_tokens(self, key: _Key) -> None:
        if self._tokens_a_minute is not None and key.tokens <= 0:
            raise busy(
                f"this API key has used up its {self._tokens_a_minute} tokens a minute; ask again "
                "later",
                max(1, math.ceil((1 - key.tokens) * 60 / self._tokens_a_minute)),
            )

    def _require_place(self, key: _Key, number: int) -> None:
        assert self._most_running is not None  # otherwise requests do not wait
        if number > self._most_running:
            raise ApiError(
                400,
                f"this asks for {number} answers at once (prompts times n), and an API key may "
                f"have {self._most_running} here; send fewer",
            )
        if key.num_waiting + number > self._most_waiting:
            raise busy(
                f"{key.running} answers of this API key are running and {key.num_waiting} wait, "
                f"and {self._most_running} and {self._most_waiting} may; ask again later",
                1,
            )

    def _let_in(self, key: _Key) -> None:
        while key.waiting and self._fits(key, key.waiting[0][0]):
            number, future = key.waiting.popleft()
            if not future.done():
                key.running += number
                future.set_result(None)


class UseLog:
    """A file with a line of JSON for each answered request: time, key, tokens.

    A key is named by the first digits of its hash. Only the server's user can read the file.
    """

    def __init__(self, path: str | None) -> None:
        """Open the file at `path`, to append lines; None: there is no log. Raises `ConfigError`."""
        self._path = path
        self._file: int | None = None
        self._num_lost = 0
        if path is None:
            return
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(
                f"the log of use {path} cannot be written: {error.strerror}"
            ) from None

    def write(
        self, owner: bytes, endpoint: str, status: str, *, prompt_tokens: int,
        generated_tokens: int, seconds: float,
    ) -> None:  # fmt: skip
        """Write a line; failures are counted and reported in the server's log."""
        if self._file is None:
            return
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "key": owner[:_NAME_BYTES].hex(), "endpoint": endpoint, "status": int(status),
            "prompt_tokens": prompt_tokens, "generated_tokens": generated_tokens,
            "seconds": round(seconds, 3),
        }  # fmt: skip
        try:
            os.write(self._file, json.dumps(line).encode() + b"\n")
        except OSError as error:
            self._num_lost += 1
            _log.error(
                "the log of use %s cannot be written: %s; %d lines are lost",
                self._path, error.strerror, self._num_lost,
            )  # fmt: skip

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
