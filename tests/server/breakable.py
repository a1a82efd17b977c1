"""A server whose model fails at one character: python -m tests.server.breakable DIRECTORY

It stands for any failure in a forward: out of memory, a failing kernel. Prints what `tandem serve
--json` prints.
"""

import json
import logging
import sys
from functools import partial
from typing import Any

import torch

import tandem
from tandem.core.errors import ExecutionError
from tandem.engine.messages import EngineSettings
from tandem.experts.execution.device import DeviceLostError
from tandem.server.options import ServerOptions
from tandem.server.serving import Source, serve

BREAKING = "~"
UNKNOWN_WORDS = "what only the log may say"
KNOWN_BREAKING = "^"
KNOWN_WORDS = "there is no memory for this; free some"
LOSING = "@@@"  # in a prompt: generated text may contain any single character
LOST_WORDS = "the GPU has stopped working for this program; start it again"


def load_tokenizer(directory: str) -> Any:
    """Load only the tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def load(directory: str) -> tuple[Any, Any]:
    """Load a model whose forward fails for two tokens, and for three of a third token."""
    model, tokenizer = tandem.load(directory), load_tokenizer(directory)
    texts = (BREAKING, KNOWN_BREAKING, LOSING[0])
    (unknown,), (known,), (losing,) = (tokenizer(text)["input_ids"] for text in texts)

    def refuse(module: Any, inputs: tuple[torch.Tensor]) -> None:
        if (inputs[0] == unknown).any():
            raise RuntimeError(UNKNOWN_WORDS)
        if (inputs[0] == known).any():
            raise ExecutionError(KNOWN_WORDS)
        if (inputs[0] == losing).sum() >= len(LOSING):
            raise DeviceLostError(LOST_WORDS)

    model.get_input_embeddings().register_forward_pre_hook(refuse)
    return model, tokenizer


def main() -> None:
    """Serve with two slots. Steps are not recorded, since a recording would omit the failure."""
    directory = sys.argv[1]
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    serve(
        Source(
            name="breakable",
            load_model=partial(load, directory),
            load_tokenizer=partial(load_tokenizer, directory),
        ),
        ServerOptions(port=0),
        EngineSettings(max_running=2, part_tokens=256, has_replay=False),
        on_ready=lambda address: print(json.dumps({"address": address}), flush=True),
    )


if __name__ == "__main__":
    main()
