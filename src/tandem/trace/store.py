"""Reads and writes routing traces as `.npz` files of format 1."""

import io
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tandem.core.errors import FileFormatError
from tandem.trace.routing import Array, RoutingTrace, TraceMeta

_OPTIONAL = ("weights", "token_ids", "predicted")
_COUNTS = ("n_moe_layers", "n_experts", "top_k")


def read_trace(path: str | Path) -> RoutingTrace:
    """Read and validate a trace.

    Raises `FileFormatError`, which names the file, the field, what was found and what was expected.
    """
    where = str(path)
    arrays = _read_arrays(Path(path), where)
    for name in ("experts", "seq_offsets", "meta"):
        if name not in arrays:
            raise FileFormatError(
                f"{where}: found the arrays {sorted(arrays)}; expected {name!r} among them"
            )
    trace = RoutingTrace(
        meta=_parse_meta(arrays["meta"], where),
        experts=arrays["experts"],
        seq_offsets=arrays["seq_offsets"],
        **{name: arrays.get(name) for name in _OPTIONAL},
    )
    trace.check(where)
    return trace


def write_trace(path: str | Path, trace: RoutingTrace) -> None:
    """Validate a trace and write it, compressed, atomically."""
    trace.check(str(path))
    meta = {
        "model": trace.meta.model,
        "n_moe_layers": trace.meta.n_moe_layers,
        "n_experts": trace.meta.n_experts,
        "top_k": trace.meta.top_k,
        **trace.meta.more,
    }
    if trace.meta.predictors:
        meta["predictors"] = list(trace.meta.predictors)
    if trace.meta.by_token:
        meta["by_token"] = list(trace.meta.by_token)
    arrays: dict[str, Any] = {
        "weights": trace.weights,
        "token_ids": trace.token_ids,
        "predicted": trace.predicted,
    }
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        experts=trace.experts,
        seq_offsets=trace.seq_offsets,
        meta=np.array(json.dumps(meta)),
        **{name: array for name, array in arrays.items() if array is not None},
    )
    partial = Path(f"{path}.partial")
    try:
        partial.write_bytes(buffer.getvalue())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _read_arrays(path: Path, where: str) -> dict[str, Array]:
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise FileFormatError(f"{where}: found {found}; expected a routing trace (.npz)")
    if path.stat().st_size == 0:
        raise FileFormatError(f"{where}: found an empty file; expected a routing trace (.npz)")
    if not zipfile.is_zipfile(path):
        raise FileFormatError(
            f"{where}: found no whole zip archive (truncated, or another kind of file); "
            "expected a routing trace (.npz)"
        )
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise FileFormatError(
            f"{where}: found an array that cannot be read ({error}); expected plain numpy arrays"
        ) from None


def _parse_meta(array: Array, where: str) -> TraceMeta:
    try:
        meta = json.loads(str(array[()]))
    except (ValueError, IndexError):
        meta = None
    if not isinstance(meta, dict):
        raise FileFormatError(f"{where}: meta is {str(array)[:60]!r}; expected a JSON object")
    for name in ("model", *_COUNTS):
        if name not in meta:
            raise FileFormatError(f"{where}: meta has {sorted(meta)}; expected {name!r} among them")
    for name in _COUNTS:
        value = meta[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise FileFormatError(f"{where}: meta.{name} is {value!r}; expected an integer >= 1")
    predictors = meta.get("predictors", [])
    if not isinstance(predictors, list) or not all(isinstance(p, str) for p in predictors):
        raise FileFormatError(
            f"{where}: meta.predictors is {predictors!r}; expected a list of names"
        )
    known = ("model", *_COUNTS, "predictors", "by_token")
    return TraceMeta(
        model=str(meta["model"]),
        **{name: meta[name] for name in _COUNTS},
        predictors=tuple(predictors),
        by_token=_parse_layers(meta, where),
        more={key: value for key, value in meta.items() if key not in known},
    )


def _parse_layers(meta: dict[str, Any], where: str) -> tuple[int, ...]:
    """Return the layers that `meta` lists as routed by token id; raises `FileFormatError`."""
    layers, count = meta.get("by_token", []), meta["n_moe_layers"]
    is_list = isinstance(layers, list) and all(type(layer) is int for layer in layers)
    if not is_list or layers != sorted({*layers} & {*range(count)}):
        raise FileFormatError(
            f"{where}: meta.by_token is {layers!r}; expected layers of 0..{count - 1}, growing"
        )
    return tuple(layers)
