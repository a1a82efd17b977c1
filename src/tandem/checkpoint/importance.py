"""Importance: how much each input of a matrix counts when the weights are rounded.

It is computed from each input's mean square over the tokens of a text, which `tandem importance`
collects; llama.cpp's files (imatrix) are read too. The larger an input, the more an error of its
weights costs.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tandem.checkpoint.input_squares import InputSquares, importance_of
from tandem.checkpoint.sources.imatrix import Find, read_dat, read_gguf
from tandem.core.errors import ConfigError, FileFormatError

_FORMAT = "tandem-importance-1"
_SQUARES, _TOKENS, _DIVERGENCE = ".mean_square", ".tokens", ".divergence"
_MANY_TOKENS = 1 << 20  # large enough to outweigh any prior


class Importance:
    """An open importance file, which looks up a parameter's importance by the parameter's name."""

    def __init__(
        self, path: Path, find: Find, divergence: Callable[[str], float | None] = lambda _: None
    ) -> None:
        """Store `find` and `divergence`, which look up a parameter by name in the file `path`."""
        self._path, self._find = path, find
        self.divergence_of = divergence
        """Returns the measured KL divergence, in nats, after coarse rounding of this parameter's
        part of the model; None if the file does not have it."""
        self._latest: tuple[str, Tensor | None] = ("", None)

    def of(self, parameter: str, shape: tuple[int, int]) -> Tensor | None:
        """Return a parameter's importance, (num_matrices, cols) fp32; None if the file lacks it.

        Each matrix's importance has mean 1. `shape` is (num_matrices, cols). Raises `ConfigError`
        if the file has another number of inputs for the parameter.
        """
        if parameter != self._latest[0]:
            found = self._find(parameter)
            weighed = None if found is None else self._weighed(parameter, found, shape)
            self._latest = (parameter, weighed)
        return self._latest[1]

    def require_some_of(self, parameters: list[str]) -> None:
        """Raise `ConfigError` if the file has none of these parameters."""
        if not any(self._find(parameter) for parameter in parameters):
            raise ConfigError(
                f"{self._path} has no matrix of this model; give the importance of this model "
                "(tandem importance MODEL)"
            )

    def _weighed(self, parameter: str, found: InputSquares, shape: tuple[int, int]) -> Tensor:
        squares = found.mean_square
        if squares.numel() != shape[0] * shape[1]:
            raise ConfigError(
                f"{self._path} has {squares.numel()} inputs of {parameter}, and the model "
                f"{shape[0]} x {shape[1]}; give the importance of this model"
            )
        squares, tokens = squares.view(shape), found.tokens
        if not len(tokens):  # without counts, inputs of ones mean that no token came
            tokens = torch.where((squares == 1).all(-1), 0, _MANY_TOKENS)
        are_inner = parameter.endswith(".down_proj")  # each expert has its own channels
        return importance_of(InputSquares(squares, tokens), are_inner=are_inner)


def save_importance(
    path: Path, found: Mapping[str, InputSquares], divergence: Mapping[str, float] | None = None
) -> None:
    """Write the collected mean squares of each parameter's inputs to a file, atomically.

    `divergence` holds the values that `Importance.divergence_of` will return, by parameter.
    """
    tensors = {
        name + _DIVERGENCE: torch.tensor(value, dtype=torch.float64, device="cpu")
        for name, value in (divergence or {}).items()
    }
    for name, (squares, tokens) in found.items():
        tensors[name + _SQUARES] = squares.float().contiguous()
        # Tensors that share memory are refused.
        tensors[name + _TOKENS] = tokens.to(torch.int64).clone()
    partial = path.with_name(f"{path.name}.part")
    try:
        save_file(tensors, partial, metadata={"format": _FORMAT})
        partial.replace(path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written ({error})") from error
    finally:
        partial.unlink(missing_ok=True)


def open_importance(path: Path) -> Importance:
    """Open an importance file of `tandem importance` or llama.cpp, recognised by its content.

    Raises `OSError`, and `FileFormatError` for a file that is damaged or of another kind.
    """
    with path.open("rb") as stream:
        begin = stream.read(9)
    if begin.startswith(b"GGUF"):
        return Importance(path, read_gguf(path))
    if not begin.endswith(b"{"):
        return Importance(path, read_dat(path))
    return _open_own(path)


def _open_own(path: Path) -> Importance:
    try:
        file: Any = safe_open(path, framework="pt")
        if (file.metadata() or {}).get("format") != _FORMAT:
            raise FileFormatError(
                f"{path} has no importance; give a file of tandem importance, or an imatrix of "
                "llama.cpp"
            )
        names = set(file.keys())
    except SafetensorError as error:
        raise FileFormatError(f"{path} is damaged ({error}); collect it again") from error

    def find(parameter: str) -> InputSquares | None:
        if parameter + _SQUARES not in names:
            return None
        return InputSquares(*(file.get_tensor(parameter + end) for end in (_SQUARES, _TOKENS)))

    def divergence(parameter: str) -> float | None:
        name = parameter + _DIVERGENCE
        return float(file.get_tensor(name)) if name in names else None

    return Importance(path, find, divergence)
