"""What a user says about the server. Loads neither torch nor FastAPI."""

import ipaddress
from dataclasses import dataclass

from tandem.core.config import option, require_range
from tandem.core.errors import ConfigError
from tandem.core.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where the server listens, and how much it takes on."""

    host: str = option("127.0.0.1", help="address to listen on", metavar="ADDRESS")
    port: int = option(8000, help="port to listen on; 0 takes a free one", metavar="PORT")
    name: str | None = option(
        None, help="the model's name for clients (default: MODEL's last part)", metavar="NAME"
    )
    max_running: int = option(4, help="requests that are answered at a time", metavar="N")
    max_waiting: int = option(
        32, help="requests that wait for a place; more are told to come again", metavar="N"
    )
    context: int | None = option(
        None, help="longest prompt with its answer, in tokens (default: the model's)", metavar="N"
    )
    part_tokens: int = option(
        256, help="prompt tokens computed at a time, between tokens of running answers", metavar="N"
    )
    request_timeout: float = option(
        600.0, help="seconds after which a request is given up", metavar="SECONDS"
    )
    shutdown_timeout: float = option(
        20.0, help="seconds that running requests have to end when the server does",
        metavar="SECONDS",
    )  # fmt: skip
    max_body: str = option("4MiB", help="largest request body", metavar="SIZE")
    allow_origin: str | None = option(
        None, help="let pages of this origin call the API (CORS); default: none", metavar="ORIGIN"
    )
    log_prompts: bool = option(False, help="write prompts to the log")

    def __post_init__(self) -> None:
        """Check every range; `ConfigError` names the field, the value and what is expected."""
        require_range("port", self.port, 0, 65535, what="a port")
        require_range("max_running", self.max_running, 1, 256, what="a number of requests")
        require_range("max_waiting", self.max_waiting, 0, 100_000, what="a number of requests")
        require_range("part_tokens", self.part_tokens, 1, what="a number of tokens")
        require_range("request_timeout", self.request_timeout, 1e-3, what="seconds")
        require_range("shutdown_timeout", self.shutdown_timeout, 0, what="seconds")
        if self.context is not None:
            require_range("context", self.context, 2, what="a number of tokens")
        parse_bytes(self.max_body, name="max_body")

    @property
    def max_body_bytes(self) -> int:
        """Largest request body in bytes."""
        return parse_bytes(self.max_body, name="max_body")


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_key(host: str, api_key: str | None) -> None:
    """Raise `ConfigError` for a server that others reach and anybody could use."""
    if api_key is not None and not api_key.strip():
        raise ConfigError("the API key is empty; set TANDEM_API_KEY to a long random string")
    if api_key is None and not is_loopback(host):
        raise ConfigError(
            f"listening on {host} lets other machines in; set TANDEM_API_KEY to a long random "
            "string that clients send, or listen on 127.0.0.1"
        )
