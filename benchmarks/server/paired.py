"""A server whose engine process also answers without it: python -m benchmarks.server.paired MODEL

On SIGUSR1 the engine process lets `Generator` write one answer with the same model, memory and
threads, and appends the seconds between its tokens to a file, as a line of JSON with the bytes that
a step touches. So the two ways differ only by the server; experts are counted in both, as in
`tandem bench`. On SIGUSR2 it appends when each recorded step began and ended. Prints what
`tandem serve --json` prints, and the file's name.
"""

import argparse
import itertools
import json
import logging
import os
import signal
import sys
import tempfile
import time
from functools import partial
from typing import Any

from torch import Tensor, nn

from tandem.cli.model_choice import (
    ModelChoice,
    find_model,
    load_model_and_tokenizer,
    load_tokenizer,
)
from tandem.devices.options import OffloadOptions
from tandem.engine.messages import EngineSettings
from tandem.generate.generator import Generator
from tandem.hf.packed_layers import PackedLinear
from tandem.hf.runtime import require_runtime
from tandem.recording.recorded_graph import RecordedGraph
from tandem.server.options import ServerOptions
from tandem.server.serving import Source, serve

PROMPT = "Tell me a long story about a river, its people and their boats."

# A prompt that is asked again would be answered from drafts, several tokens at once.
_SPECULATE = "none"


def generator_gaps(generator: Generator, tokens: int) -> list[float]:
    """Return the seconds between the tokens of a greedy answer."""
    messages = [{"role": "user", "content": PROMPT}]
    batch = generator.start(messages, max_new_tokens=tokens, temperature=0.0)
    times = []
    while not batch.is_done:
        batch.advance()
        times.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(times)]


def step_bytes(model: Any, num_tokens: int) -> float:
    """Return the bytes of weights that a step of this many tokens touches under uniform routing.

    n tokens touch experts * (1 - (1 - top_k / experts) ** n) of a layer.
    """
    top_k = model.config.get_text_config().num_experts_per_tok
    touched = 0.0
    for module in model.modules():
        if isinstance(module, PackedLinear):
            touched += module.packed.num_bytes
        elif isinstance(module, nn.Linear):
            touched += module.weight.nbytes
    for layer in require_runtime(model).store:
        count = layer.arrivals.num_experts
        touched += layer.num_bytes * (1 - (1 - top_k / count) ** num_tokens)
    return touched


def note_steps(results: str) -> None:
    """Note when recorded steps begin and end, in seconds; SIGUSR2 writes them to `results`."""
    noted: list[tuple[float, float]] = []
    run = RecordedGraph.run

    def run_and_note(graph: RecordedGraph) -> Tensor:
        start = time.perf_counter()
        result = run(graph)
        noted.append((start, time.perf_counter()))
        return result

    def write(number: int, frame: Any) -> None:
        with open(results, "a", encoding="utf-8") as file:
            file.write(json.dumps({"steps": noted}) + "\n")
        noted.clear()

    setattr(RecordedGraph, "run", run_and_note)  # noqa: B010  a method, for the type checker
    signal.signal(signal.SIGUSR2, write)


def load(
    choice: ModelChoice, offload: OffloadOptions, dense_dtype: str, tokens: int, results: str
) -> tuple[Any, Any]:
    """Load the model, and install the signal handler that answers with it."""
    model, tokenizer = load_model_and_tokenizer(
        choice, offload, quiet=True, dense_dtype=dense_dtype
    )
    generators: list[Generator] = []

    def answer(number: int, frame: Any) -> None:
        if not generators:  # by now the server has packed its layers
            generators.append(Generator(model, tokenizer, speculate=_SPECULATE))
        gaps = generator_gaps(generators[0], tokens)
        touched = {num_tokens: step_bytes(model, num_tokens) for num_tokens in (1, 4)}
        with open(results, "a", encoding="utf-8") as file:
            file.write(json.dumps({"gaps": gaps, "step_bytes": touched}) + "\n")

    signal.signal(signal.SIGUSR1, answer)
    note_steps(results)
    return model, tokenizer


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--expert-dtype", default="auto")
    parser.add_argument("--dense-dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    choice = find_model(ModelChoice(model=options.model), quiet=True)
    offload = OffloadOptions(expert_dtype=options.expert_dtype, threads=2)
    handle, results = tempfile.mkstemp(suffix=".jsonl")
    os.close(handle)
    source = Source(
        name=options.model,
        load_model=partial(load, choice, offload, options.dense_dtype, options.tokens, results),
        load_tokenizer=partial(load_tokenizer, choice),
    )

    def announce(address: str) -> None:
        print(json.dumps({"address": address, "results": results}), flush=True)

    try:
        serve(
            source,
            ServerOptions(port=0),
            EngineSettings(max_running=8, part_tokens=256, speculate=_SPECULATE),
            on_ready=announce,
        )
    finally:
        os.unlink(results)


if __name__ == "__main__":
    main()
