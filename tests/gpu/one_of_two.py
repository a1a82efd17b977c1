"""A process that shares a GPU with another one: `python -m tests.gpu.one_of_two DIRECTORY`.

It reports when it is ready, waits for a line, then generates tokens; the last line is JSON.
"""

import json
import sys
from pathlib import Path

import torch

from tandem.generate.generator import Generator
from tests.gpu.models import load_hybrid
from tests.inside import runtime_in

GPU_MEMORY = "1GB"
PROMPT = [40, 41, 42, 43]
NEW_TOKENS = 200


def main() -> int:
    """Load, wait, answer; return the exit code."""
    directory = Path(sys.argv[1])
    model = load_hybrid(directory / "mixtral", "float32", directory, gpu_memory=GPU_MEMORY)
    cache = runtime_in(model).executor.cache
    cache.resize(cache.geometry.num_layers * cache.geometry.num_experts // 2)
    model.generation_config.eos_token_id = None
    print("ready", flush=True)
    sys.stdin.readline()
    answer = Generator(model).generate(PROMPT, max_new_tokens=NEW_TOKENS, temperature=0)[0]
    peak = torch.cuda.max_memory_reserved()
    print(json.dumps({"tokens": answer.token_ids, "peak_bytes": peak}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
