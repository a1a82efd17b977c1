"""The user's options of the server. Loads neither torch nor FastAPI."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.config import option, require_range
from tandem.core.errors import ConfigError
from tandem.core.units import parse_bytes
from tandem.generate.speculation import SPECULATE, require_one_drafter

CONTEXT_FULL = ("stop", "trim")
_MAX_BODY, _MAX_BODY_WITH_IMAGES = "4MiB", "32MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where the server listens, and its limits."""

    host: str = option("127.0.0.1", help="address to listen on", metavar="ADDRESS")
    port: int = option(8000, help="port to listen on; 0 takes a free one", metavar="PORT")
    name: str | None = option(
        None, help="the model's name for clients (default: MODEL's last part)", metavar="NAME"
    )
    served_model_name: str | None = option(
        None, help="the model's names for clients, separated by commas; answers carry the first, "
        "and requests for any other name are refused",
        metavar="NAMES",
    )  # fmt: skip
    strict: bool = option(
        False, help="refuse requests with unknown fields or another model's name; else they are "
        "ignored, with a line in the log"
    )  # fmt: skip
    max_running: int = option(4, help="requests that are answered at a time", metavar="N")
    max_waiting: int = option(
        256, help="prompts and choices that wait for a sequence slot; more are refused with 429",
        metavar="N",
    )  # fmt: skip
    context: int | None = option(
        None, help="longest prompt with its answer, in tokens (default: the model's)", metavar="N"
    )
    context_full: str = option(
        "stop", choices=CONTEXT_FULL,
        help="a conversation that does not fit: stop refuses it, trim drops its oldest turns",
    )  # fmt: skip
    part_tokens: int = option(
        256, help="prompt tokens computed at a time, between tokens of running answers", metavar="N"
    )
    max_gap: float = option(
        0.5, help="seconds that a stream's next token waits for other requests' prompts at most",
        metavar="SECONDS",
    )  # fmt: skip
    kv_disk: str | None = option(
        None, help="keep beginnings of prompts on disk, for later and after a restart, within SIZE "
        "(20GiB, for instance; default: they are only kept in memory)",
        metavar="SIZE",
    )  # fmt: skip
    speculate: str = option(
        "auto", choices=SPECULATE, help="draft tokens and verify them together where that pays: "
        "auto, lookup (what followed the same words before), mtp (the model's own layer for that "
        "too), none; answers are the same",
    )  # fmt: skip
    draft: str | None = option(
        None, help="small model with the same vocabulary that drafts tokens", metavar="MODEL"
    )
    request_timeout: float = option(
        600.0, help="seconds after which a request is given up", metavar="SECONDS"
    )
    engine_timeout: float = option(
        300.0, help="seconds without a sign of life from the engine process, while requests run, "
        "after which it is started again; a prompt's computation gives one with every layer",
        metavar="SECONDS",
    )  # fmt: skip
    shutdown_timeout: float = option(
        20.0, help="seconds that running requests have to end when the server does",
        metavar="SECONDS",
    )  # fmt: skip
    max_body: str | None = option(
        None, help=f"largest request body (default: {_MAX_BODY}, and {_MAX_BODY_WITH_IMAGES} for a "
        "model that takes images)", metavar="SIZE",
    )  # fmt: skip
    image_files: str | None = option(
        None, help="let requests name images that are files below this directory (file:///...; "
        "default: only images in requests)", metavar="DIRECTORY",
    )  # fmt: skip
    api_key: str | None = option(
        None, help="API key that clients send, or several separated by commas; this machine's "
        "other users see it among its processes, TANDEM_API_KEY and a file they do not",
        metavar="KEYS",
    )  # fmt: skip
    api_key_file: str | None = option(
        None, help="file with one API key in each line", metavar="FILE"
    )
    isolate_keys: bool = option(
        False, help="keep apart what requests of different API keys leave: beginnings of prompts "
        "in memory and on disk, kept responses, drafts"
    )  # fmt: skip
    key_running: int | None = option(
        None, help="answers of one API key at a time; its others wait (default: no limit)",
        metavar="N",
    )  # fmt: skip
    key_waiting: int | None = option(
        None, help="answers of one API key that wait; more are refused with 429 (default: "
        "--max-waiting)",
        metavar="N",
    )  # fmt: skip
    key_tokens_per_minute: int | None = option(
        None, help="tokens of prompts and answers that one API key may take in a minute; then its "
        "requests are refused with 429 (default: no limit)",
        metavar="N",
    )  # fmt: skip
    use_log: str | None = option(
        None, help="append a line of JSON for each answered request: time, API key (the first "
        "digits of its hash), endpoint, status, tokens, seconds",
        metavar="FILE",
    )  # fmt: skip
    allow_origin: str | None = option(
        None, help="let pages of this origin call the API (CORS); default: none", metavar="ORIGIN"
    )
    log_prompts: bool = option(False, help="write prompts to the log")

    def __post_init__(self) -> None:
        """Check every range; `ConfigError` names the field, the value and what is expected."""
        require_one_drafter(self.speculate, self.draft)
        require_range("port", self.port, 0, 65535, what="a port")
        require_range("max_running", self.max_running, 1, 256, what="a number of requests")
        require_range("max_waiting", self.max_waiting, 0, 100_000, what="a number of requests")
        require_range("part_tokens", self.part_tokens, 1, what="a number of tokens")
        require_range("max_gap", self.max_gap, 1e-3, what="seconds")
        require_range("request_timeout", self.request_timeout, 1e-3, what="seconds")
        require_range("engine_timeout", self.engine_timeout, 1e-3, what="seconds")
        require_range("shutdown_timeout", self.shutdown_timeout, 0, what="seconds")
        if self.key_running is not None:
            require_range("key_running", self.key_running, 1, what="a number of answers")
        if (tokens := self.key_tokens_per_minute) is not None:
            require_range("key_tokens_per_minute", tokens, 1, what="a number of tokens")
        if self.key_waiting is not None:
            require_range("key_waiting", self.key_waiting, 0, 100_000, what="a number of answers")
            if self.key_running is None:
                raise ConfigError("key_waiting is for answers beyond key_running; give both")
        if self.context is not None:
            require_range("context", self.context, 2, what="a number of tokens")
        if self.context_full not in CONTEXT_FULL:
            raise ConfigError(
                f"context_full is {self.context_full!r}; expected {' or '.join(CONTEXT_FULL)}"
            )
        if self.served_model_name is not None and not self._names:
            raise ConfigError("served_model_name has no name; give one or several")
        if self.max_body is not None:
            parse_bytes(self.max_body, name="max_body")
        if self.kv_disk is not None:
            parse_bytes(self.kv_disk, name="kv_disk")

    @property
    def key_flags(self) -> tuple[str, ...]:
        """The flags in use that distinguish clients by their API keys."""
        settings = {
            "--isolate-keys": self.isolate_keys,
            "--key-running": self.key_running,
            "--key-tokens-per-minute": self.key_tokens_per_minute,
        }
        return tuple(flag for flag, value in settings.items() if value)

    @property
    def kv_disk_bytes(self) -> int:
        """Bytes that prefixes of prompts may take on disk; 0: none are kept."""
        return 0 if self.kv_disk is None else parse_bytes(self.kv_disk, name="kv_disk")

    @property
    def _names(self) -> tuple[str, ...]:
        names = [self.name or "", *(self.served_model_name or "").split(",")]
        return tuple(dict.fromkeys(name.strip() for name in names if name.strip()))

    def names(self, model: str) -> tuple[str, ...]:
        """Return the model's names for clients: `model`, unless the options give other names."""
        return self._names or (model,)

    @property
    def takes_any_name(self) -> bool:
        """Whether the model answers under any name in a request."""
        return not self.strict and self.served_model_name is None

    def max_body_bytes(self, *, has_images: bool) -> int:
        """Return the most bytes of a request body; by default more if the model takes images."""
        default = _MAX_BODY_WITH_IMAGES if has_images else _MAX_BODY
        return parse_bytes(self.max_body or default, name="max_body")


def is_loopback(host: str) -> bool:
    """Tell whether an address is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_key(host: str, api_keys: Sequence[str]) -> None:
    """Raise `ConfigError` if other machines can reach `host` and there is no API key."""
    if not api_keys and not is_loopback(host):
        raise ConfigError(
            f"listening on {host} lets other machines in; set TANDEM_API_KEY to a long random "
            "string that clients send, or listen on 127.0.0.1"
        )
