"""Writes the API reference as HTML from the docstrings: `make api-docs`."""

import pkgutil
import sys
from pathlib import Path

import pdoc
import pdoc.render

import tandem


def main() -> None:
    """Write the reference of all packages but the command line."""
    for name in tandem.__all__:  # tandem loads them lazily; pdoc calls no functions
        vars(tandem)[name] = getattr(tandem, name)
    packages = [found.name for found in pkgutil.iter_modules(tandem.__path__) if found.ispkg]
    names = [f"tandem.{name}" for name in packages if name != "cli"]
    pdoc.render.configure(show_source=False)
    pdoc.pdoc("tandem", *names, output_directory=Path(sys.argv[1]))


if __name__ == "__main__":
    main()
