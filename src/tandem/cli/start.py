"""What a start need not do: look for garbage while all is new, read the same files twice, wait."""

import contextlib
import functools
import gc
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tandem.checkpoint.packed import INDEX_FILE
from tandem.experts.store.host_memory import available_bytes
from tandem.registration import call_after_import

# Torch and Transformers make a million objects that stay: looking for garbage after every 700 of
# them, as Python has it, takes a tenth of a start, and after every 20,000 still a twentieth.
_OBJECTS_PER_COLLECTION = 200_000

# Read at a time: a thread that asks for Python's lock while modules are imported waits 5 ms.
_CHUNK_BYTES = 32 << 20

_SCANNER = "transformers.utils.import_utils"


def prepare(*, loads_model: bool) -> None:
    """Make the imports of this process, which is a command's own, cheaper.

    With `loads_model` no garbage is looked for until `has_loaded` is called.
    """
    gc.set_threshold(_OBJECTS_PER_COLLECTION, *gc.get_threshold()[1:])
    if loads_model:
        gc.disable()
    call_after_import(_SCANNER, _scan_once)


def read_early(model: str) -> threading.Thread | None:
    """Begin to read a packed model's files while Python imports what loads it.

    None if `model` is no packed directory, or more than fits into memory.
    """
    if not hasattr(os, "RWF_NOWAIT") or not (Path(model) / INDEX_FILE).is_file():
        return None
    files = sorted(Path(model).glob("*.safetensors"))
    if sum(file.stat().st_size for file in files) > available_bytes():
        return None
    thread = threading.Thread(target=_read, args=(files,), name="tandem-read-early", daemon=True)
    thread.start()
    return thread


def _read(files: Sequence[Path]) -> None:
    """Read what is not in memory; errors are left to the loader."""
    with contextlib.suppress(OSError), mmap.mmap(-1, _CHUNK_BYTES) as buffer:
        for file in files:
            with file.open("rb", buffering=0) as stream:
                for offset in range(0, file.stat().st_size, _CHUNK_BYTES):
                    try:  # its last byte without waiting: it is there
                        end = min(offset + _CHUNK_BYTES, file.stat().st_size) - 1
                        os.preadv(stream.fileno(), [bytearray(1)], end, os.RWF_NOWAIT)
                    except BlockingIOError:
                        os.preadv(stream.fileno(), [buffer], offset)


def has_loaded() -> None:
    """Look for garbage from now on, not among what has been imported and loaded."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def leave() -> None:
    """Let the process end without a last look for garbage, a tenth of a short run."""
    gc.freeze()


def _scan_once() -> None:
    """Enlarge the cache with which Transformers looks through its models' files.

    It reads 1,600 files in 549 directories at its own import, and, as its cache has room for 128,
    all of them again at that of `transformers.models`: 0.24 s (5.23, an Intel Xeon).
    """
    module = sys.modules[_SCANNER]
    scan = getattr(module, "create_import_structure_from_path", None)
    if scan is not None and hasattr(scan, "cache_parameters"):
        unbounded = functools.lru_cache(maxsize=None)
        setattr(module, scan.__name__, unbounded(scan.__wrapped__))
