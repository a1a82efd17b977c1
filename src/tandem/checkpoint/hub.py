"""Finds a model's files: a path, or a hub id whose files are fetched once and kept.

Downloads go through huggingface_hub, with its progress bar, resumption, cache and environment
variables.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tandem.core.errors import ConfigError, ModelError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# What a model needs; not the same weights once more in other frameworks' formats.
_WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")
_SHOWN_MODELS = 8


@dataclass(frozen=True, slots=True)
class HubOptions:
    """What a user says about the hub; None is huggingface_hub's own default."""

    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | None = None
    with_code: bool = False
    """Also fetch the Python code that comes with the model."""


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file."""
    return path.suffix == ".gguf" and path.is_file()


def find_model_path(model: str | Path, options: HubOptions | None = None) -> Path:
    """Return a model's directory or GGUF file, downloading a hub id; raises `ModelError`."""
    name, options = str(model), options or HubOptions()
    if not name.strip():  # a path of it would be the current directory
        raise ModelError(
            "the model's name is empty; give a model directory, a .gguf file or a hub id"
        )
    if options.revision is not None and Path(model).exists():
        raise ConfigError(
            f"revision is {options.revision!r}, and {name} is on this machine; only a hub id has "
            "revisions"
        )
    if Path(model).is_dir() or is_gguf(Path(model)):
        return Path(model)
    if not _HUB_ID.fullmatch(name) or Path(model).parent.is_dir():
        raise ModelError(
            f"{name} is not a directory; expected a model directory, a .gguf file or a hub id"
        )
    return _download(name, options)


def local_models(cache_dir: str | None = None) -> list[str]:
    """Return the ids of the models in the hub's cache on this machine."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(cache_dir).repos
    except CacheNotFound:
        return []
    return sorted(repo.repo_id for repo in repos if repo.repo_type == "model" and repo.size_on_disk)


def _download(name: str, options: HubOptions) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        directory = snapshot_download(
            name,
            revision=options.revision,
            token=options.token,
            cache_dir=options.cache_dir,
            allow_patterns=[*_WANTED, *(["*.py"] if options.with_code else [])],
        )
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{name} is not on this machine, and the hub cannot be reached; "
            f"{_what_is_here(options.cache_dir)}"
        ) from error
    except HFValidationError as error:
        raise ModelError(f"{name} is no hub id ({error}); expected OWNER/NAME") from error
    except HfHubHTTPError as error:
        first_line = str(error).strip().splitlines()[-1]
        raise ModelError(
            f"the hub does not give {name}: {first_line}; check the id and the revision, and for a "
            "gated model log in (hf auth login) or pass a token"
        ) from error
    except OSError as error:
        raise ModelError(
            f"{name} cannot be downloaded ({error.strerror or error}); "
            f"{_what_is_here(options.cache_dir)}"
        ) from error
    return Path(directory)


def _what_is_here(cache_dir: str | None) -> str:
    names = local_models(cache_dir)
    if not names:
        return "no models are here either: connect to the network, or name a directory"
    more = f" and {len(names) - _SHOWN_MODELS} more" if len(names) > _SHOWN_MODELS else ""
    return f"on this machine are {', '.join(names[:_SHOWN_MODELS])}{more}"
