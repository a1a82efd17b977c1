"""Damages the header of a GGUF file in many ways: each is read, or refused with one sentence.

python -m tests.loading.fuzz_gguf [COUNT]
"""

import random
import struct
import sys
import tempfile
import tracemalloc
from collections import Counter
from pathlib import Path

from tandem.checkpoint.sources.gguf import read_gguf_header
from tandem.core.errors import ModelError, UnsupportedModelError
from tests.loading.gguf_files import tiny_model, write_gguf
from tests.loading.test_gguf_commands import add_tokenizer

# Lengths, counts and offsets that are too large, in different ways.
_ABSURD = (0, 1, 7, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63, (1 << 64) - 1)
_LONGEST_SENTENCE = 2000
# What reading keeps beside copies of what the file has: Python's own objects.
_OBJECTS_BYTES = 1 << 20


def fuzz(directory: Path, count: int, seed: int = 0) -> Counter[str]:
    """Read so many damaged files; return how often each kind of answer came."""
    whole = write_gguf(directory / "whole.gguf", tiny_model(), "Q4_0", also=add_tokenizer)
    header = read_gguf_header(whole)
    end = min(tensor.data_offset for tensor in header.tensors.values())
    data, chance = whole.read_bytes(), random.Random(seed)
    answers: Counter[str] = Counter()
    file = directory / "damaged.gguf"
    for number in range(count):
        file.write_bytes(_damaged(data, end, chance))
        answers[_answer(file, is_measured=number % 50 == 0)] += 1
    return answers


def _answer(file: Path, *, is_measured: bool) -> str:
    if is_measured:
        tracemalloc.start()
    try:
        read_gguf_header(file)
        return "read"
    except (ModelError, UnsupportedModelError) as error:
        sentence = str(error)
        assert str(file) in sentence
        assert "\n" not in sentence.strip()
        assert len(sentence) < _LONGEST_SENTENCE
        return type(error).__name__
    finally:
        if is_measured:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < file.stat().st_size + _OBJECTS_BYTES, peak


def _damaged(data: bytes, end: int, chance: random.Random) -> bytes:
    """Return a file whose header (up to `end`) is damaged in one way or in several."""
    damaged = bytearray(data)
    match chance.randrange(5):
        case 0:  # bytes turned
            for _ in range(chance.randint(1, 8)):
                damaged[chance.randrange(end)] = chance.randrange(256)
        case 1:  # cut off, mostly in the header
            del damaged[chance.randrange(end if chance.random() < 0.8 else len(data)) :]
        case 2:  # a number that is absurd
            at = chance.randrange(end - 8)
            damaged[at : at + 8] = struct.pack("<Q", chance.choice(_ABSURD))
        case 3:  # a piece that is missing, or there twice
            at = chance.randrange(end)
            piece = damaged[at : at + chance.randint(1, 64)]
            damaged[at : at + len(piece)] = piece * chance.choice((0, 2))
        case 4:  # a word instead of another
            at = chance.randrange(end - 4)
            damaged[at : at + 4] = struct.pack("<I", chance.choice(_ABSURD) & 0xFFFFFFFF)
    return bytes(damaged)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print(dict(fuzz(Path(scratch), int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)))
