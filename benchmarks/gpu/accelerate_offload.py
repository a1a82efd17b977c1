"""Transformers with accelerate's offloading on the same shape: the alternative to Tandem.

    python -m benchmarks.gpu.accelerate_offload --shape qwen3-30b-a3b --layers 4

Experts are bf16 in host memory; accelerate copies a whole layer's experts to the GPU each time it
runs. A few layers are timed, and the model's speed is extrapolated from them, as the output says.
The last line is one JSON document.
"""

import argparse
import json
import sys
import time
from statistics import median
from typing import Any

import torch
from accelerate import cpu_offload

from tandem.bench.model_shapes import MODEL_SHAPES, find_shape
from tandem.bench.random_model import empty_model_of
from tandem.hf.compat import cache_argument
from tandem.hf.experts import is_experts_module

PROMPT_TOKENS = 32
WARM_STEPS = 1


def main() -> int:
    """Time some steps; return the exit code."""
    parser = argparse.ArgumentParser(description="Time Transformers with accelerate's offload.")
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=sorted(MODEL_SHAPES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    few = _step_seconds(options, options.layers)
    fewer = _step_seconds(options, max(1, options.layers // 2))
    per_layer = (few - fewer) / (options.layers - max(1, options.layers // 2))
    whole = find_shape(options.shape).values["num_hidden_layers"]
    seconds = few + per_layer * (whole - options.layers)
    print(
        f"{options.shape}: {per_layer * 1e3:.2f} ms a layer, timed on {options.layers}; "
        f"{1 / seconds:.2f} tok/s with {whole}, by extrapolation"
    )
    report = {"shape": options.shape, "layers": options.layers, "seconds_per_layer": per_layer,
              "decode_tokens_per_second_extrapolated": 1 / seconds}  # fmt: skip
    print(json.dumps(report))
    return 0


@torch.no_grad()
def _step_seconds(options: argparse.Namespace, num_layers: int) -> float:
    model = _model(options, num_layers)
    ids = torch.arange(PROMPT_TOKENS, device=options.device)[None] + 1
    name = cache_argument(model)
    cache = model(input_ids=ids, use_cache=True)[name]
    times: list[float] = []
    for _ in range(WARM_STEPS + options.steps):
        begin = time.perf_counter()
        model(input_ids=ids[:, :1], use_cache=True, **{name: cache}).logits.argmax().item()
        times.append(time.perf_counter() - begin)
    return median(times[WARM_STEPS:])


def _model(options: argparse.Namespace, num_layers: int) -> Any:
    shape = find_shape(options.shape).sample(num_layers)
    model = empty_model_of(shape, options.vocabulary)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.01)  # results do not matter, only copies do
    experts = [module for module in model.modules() if is_experts_module(module)]
    for module in experts:
        held = [p.data for p in module.parameters(recurse=False)]
        for parameter in module.parameters(recurse=False):
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        module.held = held
    model.to(options.device)
    for module in experts:
        for parameter, data in zip(module.parameters(recurse=False), module.held, strict=True):
            parameter.data = data
        del module.held
        cpu_offload(module, execution_device=torch.device(options.device))
    return model.eval()


if __name__ == "__main__":
    sys.exit(main())
