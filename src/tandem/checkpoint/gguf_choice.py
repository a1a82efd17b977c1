"""Chooses the GGUF files that `OWNER/NAME:Q4_K_M` means, by the rules of llama.cpp's -hf."""

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from tandem.checkpoint.sources.gguf_header import PART
from tandem.core.errors import ModelError

_SHOWN_FILES = 12


def choose_gguf(repository: str, names: Iterable[str], tag: str) -> list[str]:
    """Return the file names of the GGUF model that `tag` selects: all its parts, in order.

    `names` are the repository's files. The tag is a quantisation ("Q4_K_M", "UD-Q4_K_XL"; case is
    ignored) or a file name. If several models match, the shortest name wins. Raises `ModelError` if
    no model matches.
    """
    models: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        if name.endswith(".gguf") and not is_projector(name):
            models[_stem(name)].append(name)
    pattern = re.compile(rf"(^|[-./]){re.escape(tag)}([-./]|$)", re.IGNORECASE)
    chosen = [stem for stem, files in models.items() if tag in files or pattern.search(stem)]
    if chosen:
        return models[min(chosen, key=lambda stem: (len(stem), stem))]
    if not models:
        raise ModelError(
            f"{repository} has no .gguf file of a model; leave out :{tag} to load what it has"
        )
    shown = ", ".join(PurePosixPath(stem).name for stem in list(models)[:_SHOWN_FILES])
    more = f" and {len(models) - _SHOWN_FILES} more" if len(models) > _SHOWN_FILES else ""
    raise ModelError(
        f"{repository} has no .gguf file with {tag!r} in its name; it has {shown}{more}: give the "
        "end of one of these after the colon"
    )


def is_projector(name: str) -> bool:
    """Whether a GGUF file is a projector (mmproj), which encodes images or sound for a model."""
    return PurePosixPath(name).name.lower().startswith("mmproj") or "-mmproj" in name.lower()


def sibling_projectors(file: Path) -> list[Path]:
    """Return the projector files in the directory of a model's `file`."""
    return sorted(path for path in file.parent.glob("*.gguf") if is_projector(path.name))


def _stem(name: str) -> str:
    """Return a file's path without part number and extension: the same for all parts of a model."""
    path = PurePosixPath(name)
    part = PART.fullmatch(path.name)
    return str(path.with_name(part["stem"] if part else path.stem))
