"""What the server costs, beside the same model in a program: python -m benchmarks.server.overhead

Three figures, each between measurements of what it is compared with, in one run:
tokens per second of one stream against `Generator`; of four streams against one, with what the
bytes allow; and how long after a client has left the next request begins.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.server.running import RunningServer, running_server

from tandem.cli.models import ModelChoice, load_model_and_tokenizer
from tandem.generate.generator import Generator
from tandem.offload.options import OffloadOptions

_PROMPT = "Tell me a long story about a river, its people and their boats."
_STREAMS = 4


def stream_gaps(server: RunningServer, tokens: int, text: str = _PROMPT) -> list[float]:
    """Return the seconds between the tokens of one stream."""
    times = []
    fields: dict[str, Any] = {"max_tokens": tokens, "temperature": 0}
    with server.streaming(text, **fields) as response:
        for line in response:
            if b'"delta":{"content"' in line:  # one token, but for characters of several
                times.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(times)]


def generator_gaps(generator: Generator, tokens: int) -> list[float]:
    """Return the seconds between the tokens of the same answer in this process."""
    messages = [{"role": "user", "content": _PROMPT}]
    run = generator.start(messages, max_new_tokens=tokens, temperature=0.0)
    times = []
    while not run.is_done:
        run.advance()
        times.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(times)]


def overhead(server: RunningServer, generator: Generator, rounds: int, tokens: int) -> Any:
    """Return the median seconds per token of both, in turn, and the median of a turn's ratios."""
    ours, theirs = [], []
    for _ in range(rounds):
        theirs.append(statistics.median(generator_gaps(generator, tokens)[tokens // 4 :]))
        ours.append(statistics.median(stream_gaps(server, tokens)[tokens // 4 :]))
    ratios = [a / b - 1 for a, b in zip(ours, theirs, strict=True)]
    return {
        "generator_tokens_per_second": round(1 / statistics.median(theirs), 2),
        "server_tokens_per_second": round(1 / statistics.median(ours), 2),
        "overhead": round(statistics.median(ratios), 4),
        "overhead_of_each_turn": [round(ratio, 3) for ratio in ratios],
    }


def concurrency(server: RunningServer, rounds: int, tokens: int) -> Any:
    """Return tokens per second of one stream and of four at once, in turn."""
    one, four = [], []
    for turn in range(rounds):
        one.append(1 / statistics.median(stream_gaps(server, tokens)))
        texts = [f"{_PROMPT} ({turn}, {n})" for n in range(_STREAMS)]
        with ThreadPoolExecutor(_STREAMS) as pool:
            gaps = list(pool.map(lambda text: stream_gaps(server, tokens, text), texts))
        four.append(sum(1 / statistics.median(g[len(g) // 3 :]) for g in gaps))
    single, together = statistics.median(one), statistics.median(four)
    return {
        "one_tokens_per_second": round(single, 2),
        "four_tokens_per_second": round(together, 2),
        "ratio": round(together / single, 3),
    }


def byte_ceiling(model: Any) -> float:
    """Return how much faster four rows could be than one, if a step costs its bytes alone.

    Uniform routing: n tokens touch experts * (1 - (1 - top_k / experts) ** n) of a layer.
    """
    store = model.hf_quantizer.store
    top_k = model.config.get_text_config().num_experts_per_tok
    dense = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    dense += model.get_output_embeddings().weight.nbytes

    def step_bytes(rows: int) -> float:
        experts = 0.0
        for layer in store:
            count = layer.arrivals.num_experts
            touched = count * (1 - (1 - top_k / count) ** rows)
            experts += layer.num_bytes / count * touched
        total: float = dense + experts
        return total

    return _STREAMS * step_bytes(1) / step_bytes(_STREAMS)


def release(model: str, flags: list[str], rounds: int) -> Any:
    """Return how long after a client has left the next one's work begins, in decode steps."""
    with running_server(model, "--max-running", "1", *flags) as server:
        stream_gaps(server, 30)
        step = statistics.median(stream_gaps(server, 30))
        delays = []
        for turn in range(rounds):
            text = f"{turn} again"
            alone = first_token(server, text + "!")
            with server.streaming(_PROMPT, max_tokens=400, temperature=0) as response:
                for _ in range(20):
                    response.readline()
                pool = ThreadPoolExecutor(1)
                waiting = pool.submit(first_token_at, server, text + "?")
                server.wait_for("tandem_requests_waiting", 1)
            left = time.perf_counter()
            delays.append(waiting.result() - left - alone)
            pool.shutdown()
    return {
        "step_seconds": round(step, 4),
        "seconds_until_free": round(statistics.median(delays), 4),
        "steps_until_free": round(statistics.median(delays) / step, 2),
    }


def first_token_at(server: RunningServer, text: str) -> float:
    """Return when the first token of an answer came."""
    with server.streaming(text, max_tokens=2, temperature=0) as response:
        for line in response:
            if b'"content":' in line and b'"role"' not in line:
                return time.perf_counter()
    raise AssertionError("the answer had no text")


def first_token(server: RunningServer, text: str) -> float:
    """Return how long the first token takes when the server is idle."""
    begin = time.perf_counter()
    return first_token_at(server, text) - begin


def main() -> int:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--expert-dtype", default="auto")
    parser.add_argument("--dense-dtype", default="bf16")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    flags = ["--expert-dtype", options.expert_dtype, "--dense-dtype", options.dense_dtype]
    offload = OffloadOptions(expert_dtype=options.expert_dtype, threads=2)
    model, tokenizer = load_model_and_tokenizer(
        ModelChoice(model=options.model), offload, quiet=True, dense_dtype=options.dense_dtype
    )
    generator = Generator(model, tokenizer)
    found: dict[str, Any] = {}
    with running_server(options.model, *flags) as server:
        stream_gaps(server, 40)  # once for the records of one row
        generator_gaps(generator, 40)
        found |= overhead(server, generator, options.rounds, options.tokens)
        found |= concurrency(server, options.rounds, options.tokens)
    ceiling = byte_ceiling(model)
    found["byte_ceiling_ratio"] = round(ceiling, 3)
    found["share_of_ceiling"] = round(found["ratio"] / ceiling, 3)
    found |= release(options.model, flags, options.rounds)
    for name, value in found.items():
        print(f"{name}: {value}")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
