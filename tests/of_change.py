"""Prints the tests of what has changed since a commit, for `make test-fast`."""

import subprocess
import sys
from pathlib import Path

# Packages whose tests are in another package's directory.
_PLACES = {
    "apis": "server", "engine": "server", "checkpoint": "loading", "devices": "experts",
    "kv_cache": "decode", "machines": "hf", "text": "loading", "triton_kernels": "kernels",
}  # fmt: skip


def _git(*words: str) -> list[str]:
    return subprocess.run(
        ["git", *words], check=True, capture_output=True, text=True
    ).stdout.split()


def tests_of(path: str) -> str | None:
    """Return the test directory of a changed file; None if tests of the repository cover it."""
    match Path(path).parts:
        case ("src", "tandem", package, _, *_):
            found = f"tests/{_PLACES.get(package, package)}"
        case ("tests", package, _, *_):
            found = f"tests/{package}"
        case ("csrc", *_):
            found = "tests/kernels"
        case _:
            return None
    return found if Path(found).is_dir() else None


def main() -> None:
    """Print directories, and the tests of documents, words and examples."""
    changed = [*_git("diff", "--name-only", sys.argv[1]),
               *_git("ls-files", "--others", "--exclude-standard")]  # fmt: skip
    print(*sorted({place for one in changed if (place := tests_of(one)) is not None}))
    print(*sorted(Path("tests").glob("test_*.py")))


if __name__ == "__main__":
    main()
