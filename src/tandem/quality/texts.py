"""The texts on which models are measured, and the texts from which importance is collected.

Texts are grouped by domain and cut into windows of tokens. The module uses tokenizers, but no
model. held_out/licences.md and learnt/licences.md have the sources of the texts.
"""

import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from tandem.core.errors import ConfigError, FileFormatError
from tandem.foreign_types import Tokenizer
from tandem.text.text_tokens import token_ids

WINDOW_TOKENS = 512
# The sample of English, arithmetic and code is cut into this many parts, so that it counts as much
# as four languages.
_PARTS_OF_SAMPLE = 4
_LEAST_TOKENS = 16  # of a domain; fewer would say nothing about it


class Window(NamedTuple):
    """Tokens that a model reads without earlier context, from a text of one domain.

    They begin with the tokens that the tokenizer puts before every text.
    """

    domain: str
    ids: tuple[int, ...]


def held_out_texts() -> dict[str, str]:
    """Return the held-out texts by domain: seven languages, and code."""
    return _texts_in("held_out")


def learnt_texts() -> dict[str, str]:
    """Return the texts for collecting importance, by domain; no held-out text is among them."""
    sample = resources.files("tandem.demo").joinpath("calibration.txt").read_text(encoding="utf-8")
    quarter = len(sample) // _PARTS_OF_SAMPLE + 1
    parts = {
        f"english {i + 1}": sample[i * quarter : (i + 1) * quarter] for i in range(_PARTS_OF_SAMPLE)
    }
    return parts | _texts_in("learnt")


def _texts_in(name: str) -> dict[str, str]:
    folder = resources.files("tandem.quality").joinpath(name)
    files = sorted(file.name for file in folder.iterdir() if file.name.endswith(".txt"))
    return {
        file.removesuffix(".txt"): folder.joinpath(file).read_text(encoding="utf-8")
        for file in files
    }


def read_texts(files: Sequence[str]) -> dict[str, str]:
    """Return the texts of files by domain; a file's domain is its name without the extension.

    Raises `FileFormatError` for a file that is missing or not a text, and `ConfigError` if two
    files have the same domain.
    """
    texts: dict[str, str] = {}
    for file in files:
        path = Path(file)
        if not path.is_file():
            found = "a folder" if path.is_dir() else "no such file"
            raise FileFormatError(f"{path}: found {found}; expected a text")
        if path.stem in texts:
            raise ConfigError(f"two texts are called {path.stem}; rename one of the files")
        try:
            texts[path.stem] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise FileFormatError(
                f"{path}: the byte at {error.start} is not UTF-8; convert it, for instance with "
                "iconv"
            ) from None
    return texts


def cut_windows(
    texts: Mapping[str, str], tokenizer: Tokenizer, num_tokens: int, window: int = WINDOW_TOKENS
) -> list[Window]:
    """Cut windows from the start of each text: `num_tokens` in all, divided equally among domains.

    A text shorter than its share is used whole. Raises `ConfigError` for a text of fewer than 16
    tokens.
    """
    share = max(_LEAST_TOKENS, num_tokens // len(texts))
    before = _tokens_before(tokenizer)
    room = max(1, window - len(before))  # tokens of text that fit into one window
    windows = []
    for domain, text in texts.items():
        ids = token_ids(tokenizer, text, has_special=False, most_tokens=None)
        if len(ids) < _LEAST_TOKENS:
            raise ConfigError(
                f"the text {domain} has {len(ids)} tokens; expected at least {_LEAST_TOKENS}"
            )
        read = ids[:share]
        windows += [
            Window(domain, (*before, *read[at : at + room])) for at in range(0, len(read), room)
        ]
    return windows


def _tokens_before(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that the tokenizer puts before every text."""
    plain, whole = (
        token_ids(tokenizer, "a", has_special=has_special, most_tokens=None)
        for has_special in (False, True)
    )
    ends = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    return whole[: next(ends, 0)]


def words_digest(windows: Sequence[Window], tokenizer: Tokenizer) -> str:
    """Return a digest of the windows' token ids and of these tokens' texts in the tokenizer.

    Models with equal digests read the same text with the same vocabulary.
    """
    names = tokenizer.convert_ids_to_tokens([token for window in windows for token in window.ids])
    ids = [list(window.ids) for window in windows]
    return hashlib.sha256(repr((ids, names)).encode("utf-8", "backslashreplace")).hexdigest()
