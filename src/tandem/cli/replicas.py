"""Replicas of the server behind one endpoint, on a Ray cluster: an application for Ray Serve.

    serve run tandem.cli.replicas:application model=demo replicas=2

Each replica is a whole server with a model of its own. Ray starts the replicas, distributes the
requests among them, and restarts a replica that dies. The options are those of `tandem serve`, with
underscores.
"""

import contextlib
import dataclasses
import functools
import typing
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tandem.cli.images import load_image_reader
from tandem.cli.model_choice import (
    ModelChoice,
    find_model,
    load_model_and_tokenizer,
    load_tokenizer,
)
from tandem.cli.served import engine_settings, served_offload, server_keys
from tandem.core.config import field_type
from tandem.core.errors import ConfigError
from tandem.core.registry import nearest_names
from tandem.devices.options import OffloadOptions
from tandem.server.options import ServerOptions

T = TypeVar("T")
_OPTIONS = (ServerOptions, OffloadOptions, ModelChoice)
_ADDRESS = ("host", "port")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """The number of replicas, what Ray reserves for each, and the format of linear layers."""

    replicas: int = 2
    cpus: float = 1.0
    """CPU cores that Ray reserves for a replica."""
    gpus: float = 0.0
    dense_dtype: str = "auto"


def application(arguments: Mapping[str, str]) -> Any:
    """Return the application for `serve run`; raises `ConfigError` for an unknown or bad option."""
    _refuse_unknown(arguments)
    own, server = _options(ReplicaOptions, arguments), _options(ServerOptions, arguments)
    offload, choice = _options(OffloadOptions, arguments), _options(ModelChoice, arguments)
    keys = server_keys(server)
    from ray import serve

    build = functools.partial(_build_app, own, server, offload, choice, keys)
    deployment = serve.deployment(
        serve.ingress(lambda: build())(),
        name="tandem",
        num_replicas=own.replicas,
        # Ray must not reject a request first: a full replica answers in OpenAI's format.
        max_ongoing_requests=server.max_running + server.max_waiting + 16,
        ray_actor_options={"num_cpus": own.cpus, "num_gpus": own.gpus},
    )
    return deployment.bind()


def _build_app(
    own: ReplicaOptions,
    options: ServerOptions,
    offload: OffloadOptions,
    choice: ModelChoice,
    api_keys: tuple[str, ...],
) -> Any:
    """Return one replica's web application, which starts and stops an engine process of its own."""
    from tandem.apis.images import allowed_directory
    from tandem.server.app import create_app
    from tandem.server.engine_client import EngineClient
    from tandem.server.service import Server

    found = find_model(choice, quiet=True)
    load = functools.partial(
        load_model_and_tokenizer,
        found,
        served_offload(offload, options),
        quiet=True,
        dense_dtype=own.dense_dtype,
    )
    settings = engine_settings(options, found, quiet=True)
    engine = EngineClient(load, settings, max_waiting=options.max_waiting)
    images = load_image_reader(found, allowed_directory(options.image_files))
    server = Server(engine, load_tokenizer(found), options, Path(choice.model).name, images)

    @contextlib.asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        server.start()
        await engine.start()
        yield
        await engine.drain(options.shutdown_timeout)
        server.close()
        await engine.close()

    return create_app(server, api_keys=api_keys, allowed_hosts=None, lifespan=lifespan)


def _options(kind: type[T], arguments: Mapping[str, str]) -> T:
    """Return an instance of `kind`, an options class, made from `name=value` arguments."""
    hints = typing.get_type_hints(kind)
    found = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name not in arguments:
            continue
        text = str(arguments[field.name])
        converted = field_type(hints[field.name])
        try:
            found[field.name] = text.lower() == "true" if converted is bool else converted(text)
        except ValueError as error:
            raise ConfigError(f"{field.name} is {text!r}; expected {converted.__name__}") from error
    return kind(**found)


def _refuse_unknown(arguments: Mapping[str, str]) -> None:
    known = [f.name for kind in (ReplicaOptions, *_OPTIONS) for f in dataclasses.fields(kind)]
    for name in arguments:
        if name in _ADDRESS:
            raise ConfigError(
                f"{name}={arguments[name]} is ignored by replicas, because Ray's proxy listens for "
                "them; give the address to Ray (http_options)"
            )
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; {nearest_names(name, known)}")
