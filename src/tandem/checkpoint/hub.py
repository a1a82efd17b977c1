"""Finds a model's files: at a local path, or by a hub id, whose files are downloaded once.

Downloads go through huggingface_hub, with its progress bar, resumption, cache and environment
variables. `OWNER/NAME:TAG` names one GGUF model of a repository; the repository's other files are
not downloaded.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tandem.checkpoint.gguf_choice import choose_gguf, is_projector
from tandem.checkpoint.hub_sums import SUMS_FILE, require_as_published
from tandem.checkpoint.sources.gguf_header import parts_of
from tandem.core.errors import ConfigError, ModelError, first_line

_HUB_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<tag>[\w.-]+))?")
# The files that a model needs, without copies of its weights in other frameworks' formats.
_WEIGHED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")
# And the files that describe its origin, which may change after a model was published.
_FILE_PATTERNS = (*_WEIGHED, SUMS_FILE, "README.md", "LICENSE*")
_SHOWN_MODELS = 8
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class HubOptions:
    """The user's settings for the hub; None means huggingface_hub's own default."""

    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | None = None
    with_code: bool = False
    """Also fetch the Python code that comes with the model."""


def is_gguf(path: Path) -> bool:
    """Whether a path is an existing file with the extension .gguf."""
    return path.suffix == ".gguf" and path.is_file()


def find_model_path(model: str | Path, options: HubOptions | None = None) -> Path:
    """Return the path of a model's directory or (first) GGUF file; a hub id is downloaded first.

    Raises `ModelError` if there is no such model, and `ConfigError` for a revision of a local path.
    """
    name, options = str(model), options or HubOptions()
    if not name.strip():  # `Path` would take it for the current directory
        raise ModelError(
            "the model's name is empty; give a model directory, a .gguf file or a hub id"
        )
    if options.revision is not None and Path(model).exists():
        raise ConfigError(
            f"revision is {options.revision!r}, and {name} is on this machine; only a hub id has "
            "revisions"
        )
    if is_gguf(Path(model)):
        return parts_of(Path(model))[0]
    if Path(model).is_dir():
        _require_no_gguf(Path(model))
        return Path(model)
    hub_id = _HUB_ID.fullmatch(name)
    if hub_id is None or Path(model).parent.is_dir():
        raise ModelError(
            f"{name} is not a directory or a .gguf file; expected one of them or a hub id"
        )
    if hub_id["tag"] is not None:
        return _download_gguf(hub_id["name"], hub_id["tag"], options)
    patterns = [*_FILE_PATTERNS, *(["*.py"] if options.with_code else [])]
    path = _download(name, options, patterns)
    require_as_published(path, name, _WEIGHED)
    if not (path / "config.json").exists():
        raise ModelError(
            f"{name} has no config.json; expected a Transformers checkpoint, or for GGUF files "
            f"their type after a colon, such as {name}:Q4_K_M"
        )
    return path


def _require_no_gguf(directory: Path) -> None:
    """Raise `ModelError` for a directory that has GGUF files but no config.json."""
    files = [path for path in sorted(directory.glob("*.gguf")) if not is_projector(path.name)]
    if files and not (directory / "config.json").exists():
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        raise ModelError(
            f"{directory} has no config.json but {files[0].name}{more}; a GGUF file is named itself"
        )


def local_models(cache_dir: str | None = None) -> list[str]:
    """Return the ids of the models in the hub's cache on this machine."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(cache_dir).repos
    except CacheNotFound:
        return []
    return sorted(repo.repo_id for repo in repos if repo.repo_type == "model" and repo.size_on_disk)


def _download_gguf(name: str, tag: str, options: HubOptions) -> Path:
    """Download the GGUF model that `tag` names, and no other files; return its first file.

    Offline, this returns the file of an earlier download.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    def listed() -> list[str] | None:
        try:
            return HfApi(token=options.token).list_repo_files(name, revision=options.revision)
        except (HfHubHTTPError, HFValidationError):
            raise
        except Exception:  # offline; the class of the error differs between versions of the hub
            return None

    names = _from_hub(name, options, listed)
    if names is None:
        here = _fetched_files(name, options)
        return here[choose_gguf(name, here, tag)[0]]
    files = choose_gguf(name, names, tag)
    return _download(name, options, files) / files[0]


def _fetched_files(name: str, options: HubOptions) -> dict[str, Path]:
    """Return the requested revision's files in the hub's cache, by name; `ModelError` if none."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = [r for r in scan_cache_dir(options.cache_dir).repos if r.repo_id == name]
    except CacheNotFound:
        repos = []
    requested = options.revision or "main"
    for revision in (revision for repo in repos for revision in repo.revisions):
        if requested == revision.commit_hash or requested in revision.refs:
            root = revision.snapshot_path
            return {str(f.file_path.relative_to(root)): f.file_path for f in revision.files}
    raise _not_here(name, options)


def _download(name: str, options: HubOptions, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    def fetch() -> str:
        return snapshot_download(
            name,
            revision=options.revision,
            token=options.token,
            cache_dir=options.cache_dir,
            allow_patterns=patterns,
        )

    return Path(_from_hub(name, options, fetch))


def _from_hub(name: str, options: HubOptions, ask: Callable[[], _Answer]) -> _Answer:
    """Return the result of `ask`, a request to the hub; raises `ModelError` if it fails."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return ask()
    except LocalEntryNotFoundError as error:
        raise _not_here(name, options) from error
    except HFValidationError as error:
        raise ModelError(f"{name} is not a hub id ({error}); expected OWNER/NAME") from error
    except HfHubHTTPError as error:
        last_line = str(error).strip().splitlines()[-1]
        raise ModelError(
            f"the hub refuses to send {name}: {last_line}; check the id and the revision, and for "
            "a gated model log in (hf auth login) or pass a token"
        ) from error
    except Exception as error:  # the system's, or one that the hub's versions change
        why = first_line(error)
        raise ModelError(
            f"{name} cannot be downloaded ({why}); {_what_is_here(options.cache_dir)}"
        ) from error


def _not_here(name: str, options: HubOptions) -> ModelError:
    return ModelError(
        f"{name} is not on this machine, and the hub cannot be reached; "
        f"{_what_is_here(options.cache_dir)}"
    )


def _what_is_here(cache_dir: str | None) -> str:
    names = local_models(cache_dir)
    if not names:
        return "no models are here either: connect to the network, or name a directory"
    more = f" and {len(names) - _SHOWN_MODELS} more" if len(names) > _SHOWN_MODELS else ""
    return f"on this machine are {', '.join(names[:_SHOWN_MODELS])}{more}"
