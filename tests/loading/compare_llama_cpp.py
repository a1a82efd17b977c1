"""Compares llama.cpp's answers for the tests' tiny GGUF files with Tandem's.

    python -m tests.loading.compare_llama_cpp      (needs llama-cpp-python)

It shows that the files follow llama.cpp's converter: row orders, names, metadata. Both programs
round activations to int8, so a difference of a few percent is expected.
"""

import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch
from torch import Tensor

import tandem
from tests.loading.gguf_files import TINY, tiny_model, write_gguf
from tests.loading.test_gguf_commands import add_tokenizer

_TOKENS = [5, 40, 17, 99, 64, 23, 88, 31, 7, 54]


def main() -> None:
    """Print the relative differences from Transformers' answers."""
    with tempfile.TemporaryDirectory() as directory:
        for architecture in TINY:
            file = Path(directory) / f"{architecture}.gguf"
            model = tiny_model(architecture)
            kind = "MXFP4" if architecture == "gpt-oss" else "Q8_0"
            write_gguf(file, model, kind, architecture, also=add_tokenizer)
            expected = _logits(model)
            ours = _difference(_logits(tandem.load(file, dtype="fp32")), expected)
            theirs = _difference(_llama_cpp(file), expected)
            print(f"{architecture:<12} tandem {ours:.4f}   llama.cpp {theirs:.4f}")


def _logits(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([_TOKENS])).logits[0].float()
    return logits


def _llama_cpp(file: Path) -> Tensor:
    model: Any = llama_cpp.Llama(str(file), n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    model.eval(_TOKENS)
    return torch.from_numpy(np.array(model.scores[: len(_TOKENS)]))


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


if __name__ == "__main__":
    main()
