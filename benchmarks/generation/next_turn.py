"""The next turn of a conversation over computing all: python -m benchmarks.generation.next_turn

A random model of a shape reads a conversation, then its continuation, then an edited one.
"""

import argparse
import time

import torch

from tandem.bench.model_shapes import find_shape
from tandem.bench.random_model import build_random_model
from tandem.generate.generator import Generator
from tandem.hf.config import OffloadConfig


def main() -> None:
    """Print the seconds to the first token of three prompts, and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3.6-35b-a3b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--new", type=int, default=64)
    arguments = parser.parse_args()
    offload = OffloadConfig(expert_dtype="int4")
    model = build_random_model(
        find_shape(arguments.shape), offload,
        num_layers=arguments.layers, vocabulary=32_000,
    )  # fmt: skip
    generator = Generator(model)
    draw = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(100, 30_000, (count,), generator=draw).tolist()

    def seconds(prompt: list[int]) -> float:
        start = time.perf_counter()
        generator.generate(prompt, max_new_tokens=1)
        return time.perf_counter() - start

    seconds(tokens(8))  # tries how the model is stepped
    conversation = tokens(arguments.tokens)
    first = seconds(conversation)
    print(f"all {arguments.tokens} tokens: {first:.2f} s", flush=True)
    for name, prompt in (
        ("next turn", conversation + tokens(arguments.new)),
        ("edited 100 tokens before its end", conversation[:-100] + tokens(arguments.new)),
    ):
        again = seconds(prompt)
        print(f"{name}: {again:.2f} s, {again / first:.3f} of all", flush=True)


if __name__ == "__main__":
    main()
