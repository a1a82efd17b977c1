"""A reference's logits in a file, so that the reference need not be in memory during a measurement.

The safetensors file has the tokens of all windows, and for each token the fp16 logits of the whole
vocabulary, minus the largest logit. So large logits are exact to a thousandth, and their softmax is
the distribution. There is a checksum of each window's logits.
"""

import itertools
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.core.errors import FileFormatError
from tandem.quality.texts import Window

_FORMAT = "tandem-logits-1"


class LogitsWriter:
    """Writes logits in the order of the windows' tokens; the file appears after the `with` body.

    If the body raises an error, no file is left.
    """

    def __init__(self, path: Path, windows: Sequence[Window], words: str) -> None:
        """Open a partial file beside `path`.

        `words` must be the windows' `words_digest` with the model's tokenizer.
        """
        self._path, self._partial = path, path.with_name(f"{path.name}.part")
        self._windows, self._words = windows, words
        self._sums = [0] * len(windows)
        self._sums_at = 0
        self._stream = self._partial.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._stream:
            if kind is None:
                self._stream.seek(self._sums_at)
                self._stream.write(np.array(self._sums, np.int64).tobytes())
        if kind is None:
            self._partial.replace(self._path)
        else:
            self._partial.unlink()

    def add(self, number: int, logits: Tensor) -> None:
        """Write the logits (n_tokens, vocabulary), of any float dtype, of window `number`.

        Calls must follow the order of the windows and of each window's tokens.
        """
        if not self._sums_at:
            self._begin(logits.shape[1])
        below = logits.float() - logits.float().amax(-1, keepdim=True)
        rows = below.clamp(min=torch.finfo(torch.float16).min).half().numpy().tobytes()
        self._sums[number] = zlib.crc32(rows, self._sums[number])
        self._stream.write(rows)

    def _begin(self, vocabulary: int) -> None:
        """Write the header and the tokens, and reserve room for the checksums."""
        ids = np.array([token for window in self._windows for token in window.ids], np.int64)
        lengths = np.array([len(window.ids) for window in self._windows], np.int64)
        metadata = {
            "format": _FORMAT, "words": self._words,
            "domains": json.dumps([window.domain for window in self._windows]),
        }  # fmt: skip
        header: dict[str, object] = {"__metadata__": metadata}
        end = 0
        for name, dtype, shape, size in (
            ("token_ids", "I64", [len(ids)], 8), ("lengths", "I64", [len(lengths)], 8),
            ("crc32", "I64", [len(lengths)], 8), ("logits", "F16", [len(ids), vocabulary], 2),
        ):  # fmt: skip
            begin, end = end, end + int(np.prod(shape)) * size
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        self._stream.write(len(text).to_bytes(8, "little") + text)
        self._stream.write(ids.tobytes() + lengths.tobytes())
        self._sums_at = self._stream.tell()
        self._stream.write(bytes(lengths.nbytes))


class KeptLogits:
    """Logits that `LogitsWriter` wrote, read window by window."""

    def __init__(self, path: Path) -> None:
        """Open a file; raises `FileFormatError` if it is damaged or not a file of logits."""
        self._path = path
        try:
            file: Any = safe_open(path, framework="pt")
            self._file = file
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise FileFormatError(
                    f"{path} has no logits of tandem quality --keep; give such a file, or a model"
                )
            ids, lengths, sums = (
                file.get_tensor(name).tolist() for name in ("token_ids", "lengths", "crc32")
            )
            domains = json.loads(metadata["domains"])
            self.words = metadata["words"]
            num_rows, self.vocabulary = file.get_slice("logits").get_shape()
        except (SafetensorError, KeyError, ValueError, OSError) as error:
            if isinstance(error, FileFormatError | FileNotFoundError):
                raise
            raise self._damaged(str(error)) from error
        self._sums = sums
        self._ends = list(itertools.accumulate(lengths))
        if not lengths or len(lengths) != len(domains) or self._ends[-1] != num_rows != len(ids):
            raise self._damaged("its windows are not its tokens")
        self.windows = [
            Window(domain, tuple(ids[end - length : end]))
            for domain, end, length in zip(domains, self._ends, lengths, strict=True)
        ]

    def of_window(self, number: int) -> Tensor:
        """Return a window's logits, (n_tokens, vocabulary) fp16; `FileFormatError` if damaged."""
        end = self._ends[number]
        rows: Tensor = self._file.get_slice("logits")[end - len(self.windows[number].ids) : end]
        if zlib.crc32(rows.numpy().tobytes()) != self._sums[number]:
            raise self._damaged(f"the logits of window {number} have another checksum")
        return rows

    def _damaged(self, why: str) -> FileFormatError:
        return FileFormatError(f"{self._path} is damaged ({why}); keep the logits again")
