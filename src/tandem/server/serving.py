"""Runs the server: uvicorn around the application, and the engine process."""

import asyncio
import functools
import gc
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from tandem.apis.images import ImageReader
from tandem.core.errors import ConfigError, TandemError
from tandem.engine.messages import EngineSettings, ModelLoader
from tandem.foreign_types import Tokenizer
from tandem.server.app import create_app
from tandem.server.connections import ConnectionLimits, accepted_at_once, most_connections
from tandem.server.engine_client import EngineClient
from tandem.server.gate import SignOfLife
from tandem.server.http_protocol import BoundedHttp, Connections
from tandem.server.log import written_in_a_thread
from tandem.server.options import ServerOptions, is_loopback, require_key
from tandem.server.service import Server

# `cli.main` collects garbage rarely, because a start leaves none. In a server, a collection after
# its 200,000 objects takes a third of a second, in which no client is answered. With Python's own
# 700, 10, 10 the cycles of many requests wait for one long collection. These numbers make it five
# times as frequent.
_OBJECTS_PER_COLLECTION = (700, 10, 2)
_LOCAL_NAMES = ["localhost", "127.0.0.1", "[::1]"]
# Seconds that uvicorn gives streams to end after they were sent the reason.
_LAST_SECONDS = 3
# Connections that wait in the kernel.
_KERNEL_QUEUE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The model to serve: its name, and the functions that load its parts."""

    name: str
    load_model: ModelLoader
    load_tokenizer: Callable[[], Tokenizer]
    load_images: Callable[[], ImageReader | None] = lambda: None


class _Uvicorn(uvicorn.Server):
    """Limits connections, and lets running requests end before connections close.

    Requests that do not end in time fail with an error that says why.
    """

    def __init__(
        self, app: ASGIApp, connections: Connections, engine: EngineClient, seconds: float
    ) -> None:
        config = uvicorn.Config(
            app,
            http=functools.partial(BoundedHttp, connections),  # type: ignore[arg-type]
            ws="none",
            backlog=accepted_at_once(connections.limits.connections),
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_LAST_SECONDS,
            server_header=False,
        )
        super().__init__(config)
        self._connections, self._engine, self._seconds = connections, engine, seconds
        self._watching: asyncio.Task[None] | None = None
        self.is_interrupted = False
        """Whether Ctrl-C ended the server."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.is_interrupted |= sig == signal.SIGINT
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_KERNEL_QUEUE)
        self._watching = asyncio.ensure_future(self._connections.watch())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._engine.drain(0 if self.force_exit else self._seconds)
        await super().shutdown(sockets)
        if self._watching is not None:
            self._watching.cancel()


def serve(
    source: Source,
    options: ServerOptions,
    settings: EngineSettings,
    *,
    api_keys: Sequence[str] = (),
    on_ready: Callable[[str], None],
) -> None:
    """Serve until a signal; `on_ready` receives the address once the model answers.

    Raises `TandemError` for errors that the user can fix: a port in use, a model that cannot load.
    """
    require_key(options.host, api_keys)
    listener = _listen(options.host, options.port)
    try:
        with written_in_a_thread():
            asyncio.run(_serve(source, options, settings, api_keys, listener, on_ready))
    finally:
        listener.close()


async def _serve(
    source: Source,
    options: ServerOptions,
    settings: EngineSettings,
    api_keys: Sequence[str],
    listener: socket.socket,
    on_ready: Callable[[str], None],
) -> None:
    engine = EngineClient(
        source.load_model, settings, max_waiting=options.max_waiting,
        most_silent_seconds=options.engine_timeout,
    )  # fmt: skip
    tokenizer = source.load_tokenizer()
    service = Server(engine, tokenizer, options, source.name, source.load_images())
    names = _LOCAL_NAMES if is_loopback(options.host) else None
    app = create_app(service, api_keys=api_keys, allowed_hosts=names)
    limits = ConnectionLimits(connections=most_connections())
    connections = Connections(limits, answer_at_once=SignOfLife(names))
    server = _Uvicorn(app, connections, engine, options.shutdown_timeout)
    gc.freeze()  # the objects so far stay, so collections skip them
    gc.set_threshold(*_OBJECTS_PER_COLLECTION)
    problem: list[TandemError] = []

    async def start_engine() -> None:
        try:
            await engine.start()
            service.grammars.process.start()
            on_ready(_address(listener))
        except TandemError as error:
            problem.append(error)
            server.should_exit = True

    await asyncio.sleep(0)  # Ctrl-C up to here ends the server before anything is started
    service.start()
    starting = asyncio.ensure_future(start_engine())
    try:
        await server.serve(sockets=[listener])
    finally:
        starting.cancel()
        service.close()
        await engine.close()
    # If the cancelled task ends at the same time, the loop loses the interrupt.
    if server.is_interrupted:
        raise KeyboardInterrupt
    if problem:
        raise problem[0]


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to the port; `ConfigError` if the port cannot be used.

    Called first, so that the error comes before a model is loaded.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol given, asyncio recognizes TCP and sends each part of an answer at once.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error.strerror}); choose another --port"
        ) from error
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
