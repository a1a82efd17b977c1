"""The API keys of a server, and the owner of each request.

A given key is compared in constant time and with all valid keys, so that timing reveals neither how
much of the given key is right nor which valid key it equals.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.core.errors import ConfigError

# Key of the owner in a request's state.
OWNER = "owner"
_OWNER_BYTES = 16


class ApiKeys:
    """The keys that admit requests; without keys, all requests are admitted."""

    def __init__(self, keys: Sequence[str]) -> None:
        """Store the keys, each with the identifier of its owner."""
        self._keys = [(key.encode(), _owner(key)) for key in keys]

    def owner(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Return the owner of the API key in a request's headers; None if no valid key is there.

        If the server has no keys, all requests have the owner b"".
        """
        if not self._keys:
            return b""
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        keys = [headers.get(b"x-api-key", b"")]
        keys += [bearer.strip()] if scheme.lower() == b"bearer" else []
        found = None
        for key, owner in self._keys:
            for one in keys:
                if hmac.compare_digest(one, key):
                    found = owner
        return found


def read_keys(
    listed: str | None, file: str | None, environment: str | None = None
) -> tuple[str, ...]:
    """Return the keys of a comma-separated list, a file with a key per line, and the environment.

    Raises `ConfigError` for an empty key or a file without keys.
    """
    keys = [] if listed is None else [key.strip() for key in listed.split(",")]
    if environment is not None:
        keys.append(environment.strip())
    if not all(keys):
        raise ConfigError("an API key is empty; give a long random string")
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"the file of API keys {file} cannot be read: {why}") from error
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise ConfigError(f"the file of API keys {file} has none; write one in each line")
        keys += found
    return tuple(dict.fromkeys(keys))


def _owner(key: str) -> bytes:
    """Return the identifier under which a key's data are kept: a hash of the key."""
    return hashlib.blake2b(key.encode(), digest_size=_OWNER_BYTES, person=b"tandem owner").digest()
