"""`tandem models`: lists the models on this machine with size and last use; `rm` removes models."""

import argparse
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tandem.cli.keeping import cache_dir, kept_copies
from tandem.cli.model_choice import DEMO_MODELS
from tandem.core.config import add_flags, from_flags, option
from tandem.core.errors import ConfigError
from tandem.core.registry import nearest_names
from tandem.core.units import format_bytes

_DAY_SECONDS = 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsOptions:
    """Options of `tandem models`."""

    json: bool = option(False, help="print one JSON object instead of the table")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on this machine."""

    name: str
    """The name for `tandem models rm` and, except for packed copies, for `tandem run`."""
    kind: str
    num_bytes: int
    last_used: float
    """Seconds since the epoch."""
    source: str
    remove: Callable[[], None] = field(repr=False, compare=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tandem models`."""
    parser.add_argument("action", nargs="?", default="list", choices=("list", "rm"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="with rm: the model to remove")
    add_flags(parser, ModelsOptions)


def run(flags: argparse.Namespace) -> int:
    """List or remove models; returns the exit code."""
    options = from_flags(ModelsOptions, flags)
    stored = stored_models()
    if flags.action == "rm":
        return _remove(flags.names, stored, has_json=options.json)
    if flags.names:
        raise ConfigError(f"tandem models list takes no name, found {flags.names[0]!r}")
    if options.json:
        print(json.dumps({"models": [_described(model) for model in stored]}))
    else:
        _print_table(stored)
    return 0


def stored_models() -> list[StoredModel]:
    """Return packed copies, demo models and downloads, the most recently used first."""
    found = [*_packed_copies(), *_demo_models(), *_downloads()]
    return sorted(found, key=lambda model: model.last_used, reverse=True)


def _packed_copies() -> list[StoredModel]:
    copies = kept_copies()
    return [
        StoredModel(
            copy.name,
            "packed copy, " + ", ".join(f"{k} {v}" for k, v in sorted(copy.options.items())),
            copy.num_bytes,
            copy.last_used,
            copy.source,
            partial(copies.remove, copy.name),
        )
        for copy in copies.all()
    ]


def _demo_models() -> list[StoredModel]:
    found = []
    for name in DEMO_MODELS:
        directory = cache_dir() / "models" / name
        if (directory / "config.json").is_file():
            files = [file.stat() for file in directory.iterdir() if file.is_file()]
            num_bytes, used = sum(f.st_size for f in files), max(f.st_atime for f in files)
            remove = partial(shutil.rmtree, directory)
            found.append(StoredModel(name, "demo model", num_bytes, used, str(directory), remove))
    return found


def _downloads() -> list[StoredModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return []

    def remove(revisions: list[str]) -> None:
        cache.delete_revisions(*revisions).execute()

    return [
        StoredModel(
            repo.repo_id,
            "download",
            repo.size_on_disk,
            repo.last_accessed,
            str(repo.repo_path),
            partial(remove, [revision.commit_hash for revision in repo.revisions]),
        )
        for repo in cache.repos
        if repo.repo_type == "model" and repo.size_on_disk
    ]


def _remove(names: list[str], stored: list[StoredModel], *, has_json: bool) -> int:
    if not names:
        raise ConfigError("tandem models rm needs a name; tandem models lists them")
    by_name = {model.name: model for model in stored}
    for name in names:  # check all names before removing any
        if name not in by_name:
            raise ConfigError(
                f"no model {name!r} on this machine; {nearest_names(name, [*by_name])}"
            )
    for name in names:
        by_name[name].remove()
    freed = sum(by_name[name].num_bytes for name in set(names))
    if has_json:
        print(json.dumps({"removed": names, "bytes": freed}))
    else:
        print(f"removed {', '.join(names)}: {format_bytes(freed)}")
    return 0


def _described(model: StoredModel) -> dict[str, object]:
    return {
        "name": model.name,
        "kind": model.kind,
        "bytes": model.num_bytes,
        "last_used": model.last_used,
        "source": model.source,
    }


def _print_table(stored: list[StoredModel]) -> None:
    if not stored:
        print("no models on this machine yet; tandem run builds the demo model")
        return
    rows = [
        (model.name, format_bytes(model.num_bytes), _ago(model.last_used), model.kind, model.source)
        for model in stored
    ]
    table = [("NAME", "SIZE", "LAST USED", "WHAT", "FROM"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[4]]))
    print(f"\n{format_bytes(sum(model.num_bytes for model in stored))} in total")


def _ago(moment: float) -> str:
    days = int((time.time() - moment) / _DAY_SECONDS)
    return "today" if days < 1 else f"{days} day{'s' if days > 1 else ''} ago"
