"""llama.cpp's imatrix files: mean squares of inputs, under llama.cpp's tensor names.

The current form is GGUF, with sums and token counts. The old form (.dat) has means without counts;
the means of an expert that no token reached are 1.
"""

import struct
from collections.abc import Callable, Container
from pathlib import Path

import numpy as np
import torch

from tandem.checkpoint.input_squares import InputSquares
from tandem.checkpoint.sources.gguf import find_recipe
from tandem.checkpoint.sources.gguf_header import read_part
from tandem.checkpoint.sources.gguf_models import ARCHITECTURES
from tandem.core.errors import FileFormatError, ModelError

_SUMS, _COUNTS = ".in_sum2", ".counts"
_LONGEST_NAME = 512

Find = Callable[[str], InputSquares | None]


def read_gguf(path: Path) -> Find:
    """Open an imatrix in GGUF form; return a function that looks a parameter up in it.

    Raises `FileFormatError` for a file that is damaged or no imatrix.
    """
    try:
        _, tensors = read_part(path)
    except ModelError as error:
        raise FileFormatError(str(error)) from error
    names = [name.removesuffix(_SUMS) for name in tensors if name.endswith(_SUMS)]
    if not names or any(name + _COUNTS not in tensors for name in names):
        raise FileFormatError(f"{path} is not an imatrix; give a file of llama.cpp's llama-imatrix")

    def read(name: str) -> InputSquares:
        sums, counts = (
            torch.from_numpy(np.array(tensors[name + end].data, np.float32))
            for end in (_SUMS, _COUNTS)
        )
        tokens = counts.flatten()
        return InputSquares(sums.view(len(tokens), -1) / tokens.clamp(min=1.0)[:, None], tokens)

    return _by_parameter(dict.fromkeys(names), read)


def read_dat(path: Path) -> Find:
    """Read an imatrix in the old form; return a function that looks a parameter up in it.

    Raises `FileFormatError` for a file that is damaged or no imatrix.
    """
    content = path.read_bytes()
    found: dict[str, InputSquares] = {}
    at = 4
    try:
        (num_entries,) = struct.unpack_from("<i", content)
        for _ in range(num_entries):
            (length,) = struct.unpack_from("<i", content, at)
            if not 0 < length <= _LONGEST_NAME:
                raise ValueError(f"a name has {length} bytes")
            name = content[at + 4 : at + 4 + length].decode()
            calls, count = struct.unpack_from("<ii", content, at + 4 + length)
            at += 12 + length
            values = np.frombuffer(content, "<f4", count, at) / max(1, calls)
            at += 4 * count
            found[name] = InputSquares(torch.from_numpy(values)[None], torch.empty(0, device="cpu"))
        if not found:
            raise ValueError("it has no entries")
    except (struct.error, ValueError) as error:
        raise FileFormatError(
            f"{path} is not an importance file, or is damaged ({error}); give a file of "
            "tandem importance, or an imatrix of llama.cpp"
        ) from error
    return _by_parameter(dict.fromkeys(found), found.__getitem__)


def _by_parameter(names: Container[str], read: Callable[[str], InputSquares]) -> Find:
    """Return a function from a parameter's name in Transformers to its mean squares in the file.

    The function returns None for a parameter that the file lacks. `names` are llama.cpp's names of
    the tensors in the file; `read` returns the mean squares for such a name.
    """

    def find(parameter: str) -> InputSquares | None:
        for architecture in ARCHITECTURES.values():
            recipe = find_recipe(architecture, parameter, names)
            if recipe is not None and recipe.values is None and recipe.columns is None:
                return read(recipe.tensors[0])  # gate and up have the same inputs
        return None

    return find
