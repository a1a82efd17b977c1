"""Ways to take Python out of a decode step: python -m benchmarks.generation.step_engines [--json]

All run one and the same model, Qwen3-MoE with all its layers and hardly any width, in bf16 on one
thread. Each is a process of its own, and they take turns. Start-up is from a model in memory to the
end of the eighth step: at first, and in another process, which finds what the first one has
compiled. Each engine's logits are compared with those of Transformers.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import tandem
from tandem.bench.model_shapes import find_shape
from tandem.hf.compat import cache_argument

TINY = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": 16, "moe_intermediate_size": 32, "vocab_size": 1000,
}  # fmt: skip
CAPACITY = 256  # positions of the fixed KV cache
FIRST_STEPS = 8  # Tandem compares the first ones
STEPS = 20  # of a turn
MAX_ROUNDS = (CAPACITY - FIRST_STEPS) // STEPS
TOLERANCE = 0.1  # of the logits' norm, in bf16

# A decode step: (token, position) to logits (1, vocabulary).
Step = Callable[[int, int], Tensor]


class FixedKeysAndValues(NamedTuple):
    """Stands for one of Transformers' caches: writes at a position that is a tensor."""

    position: Tensor
    keys: Any
    """By layer; so are the values."""
    values: Any

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Write one position; return all of them."""
        self.keys[layer].index_copy_(2, self.position, key)
        self.values[layer].index_copy_(2, self.position, value)
        return self.keys[layer], self.values[layer]


def load_transformers(folder: Path) -> Any:
    """Load the model; its experts are computed as compilers can read it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.set_experts_implementation("batched_mm")
    return model.requires_grad_(False)


def new_keys_and_values(config: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return empty keys and values of each layer."""
    shape = (1, config.num_key_value_heads, CAPACITY, config.head_dim)
    layers = range(config.num_hidden_layers)
    keys = [torch.zeros(shape, dtype=torch.bfloat16) for _ in layers]
    return keys, [torch.zeros_like(key) for key in keys]


def mask_of(position: Tensor) -> Tensor:
    """Return which positions a token sees: (1, 1, 1, capacity)."""
    return (torch.arange(CAPACITY) <= position)[None, None, None]


def whole_step(model: Any, ids: Tensor, position: Tensor, keys: Any, values: Any) -> Tensor:
    """Run the model's own code."""
    cache = FixedKeysAndValues(position, keys, values)
    out = model(
        input_ids=ids, position_ids=position[None], attention_mask=mask_of(position),
        use_cache=True, **{cache_argument(model): cache},
    )  # fmt: skip
    logits: Tensor = out.logits[:, -1]
    return logits


def on_tensors(model: Any, run: Callable[..., Tensor]) -> Step:
    """Give a function of tensors its inputs."""
    keys, values = new_keys_and_values(model.config)

    def step(token: int, position: int) -> Tensor:
        return run(torch.tensor([[token]]), torch.tensor([position]), keys, values)

    return step


def start_eager(model: Any, _: Path) -> Step:
    """The model's own code on torch."""
    return on_tensors(model, partial(whole_step, model))


def start_compiled(model: Any, _: Path) -> Step:
    """All of it as one graph that Inductor compiles."""
    whole = torch.compile(partial(whole_step, model), fullgraph=True, dynamic=False)
    return on_tensors(model, whole)


def start_traced(model: Any, _: Path) -> Step:
    """All of it as a graph of ATen operations, run as torch.fx writes it."""
    from torch.fx.experimental.proxy_tensor import make_fx

    graphs: list[Callable[..., Tensor]] = []

    def run(*inputs: Any) -> Tensor:
        if not graphs:
            graphs.append(make_fx(partial(whole_step, model))(*inputs))
        return graphs[0](*inputs)

    return on_tensors(model, run)


class OneLayer(nn.Module):
    """A layer as AOTInductor takes it: what changes is an argument."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, position: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Run the layer."""
        number = self.layer.self_attn.layer_idx
        cache = FixedKeysAndValues(position, {number: key}, {number: value})
        out: Tensor = self.layer(
            hidden, attention_mask=mask_of(position), position_embeddings=(cos, sin),
            **{cache_argument(self.layer): cache},
        )  # fmt: skip
        return out


def compile_layer(model: Any, package: Path) -> None:
    """Compile the first layer ahead of time into a package."""
    hidden = torch.zeros(1, 1, model.config.hidden_size, dtype=torch.bfloat16)
    position = torch.tensor([0])
    keys, values = new_keys_and_values(model.config)
    rotary = model.model.rotary_emb(hidden, position[None])
    with torch.no_grad():
        inputs = (hidden, *rotary, position, keys[0], values[0])
        exported = torch.export.export(OneLayer(model.model.layers[0]), inputs)
        torch._inductor.aoti_compile_and_package(exported, package_path=str(package))


def start_packaged(model: Any, folder: Path) -> Step:
    """One layer compiled ahead of time, loaded once for each layer's weights."""
    package = folder / "layer.pt2"
    with torch.inference_mode(False):
        if not package.exists():
            compile_layer(model, package)
    layers = []
    for layer in model.model.layers:
        layers.append(torch._inductor.aoti_load_package(str(package)))
        weights, names = OneLayer(layer).state_dict(), layers[-1].get_constant_fqns()
        used = {name: weights[name] for name in names if name in weights}
        layers[-1].load_constants(used, check_full_update=False, user_managed=True)

    def run(ids: Tensor, position: Tensor, keys: Any, values: Any) -> Tensor:
        hidden = model.model.embed_tokens(ids)
        cos, sin = model.model.rotary_emb(hidden, position[None])
        for layer, key, value in zip(layers, keys, values, strict=True):
            hidden = layer(hidden, cos, sin, position, key, value)
        logits: Tensor = model.lm_head(model.model.norm(hidden))[:, -1]
        return logits

    return on_tensors(model, run)


def load_tandem(folder: Path) -> Any:
    """Load the model with packed linear layers and experts, in bf16 like the others."""
    return tandem.load(folder, dtype="bfloat16", expert_dtype="bf16", dense_dtype="bf16", threads=1)


def start_tandem(model: Any, _: Path, *, has_replay: bool) -> Step:
    """Native attention, linear layers, norms and experts, called by the model's code or not."""
    slots = tandem.Generator(model, has_replay=has_replay).slot_pool(1)

    def step(token: int, position: int) -> Tensor:
        return slots.prefill({0: [token]}) if position == 0 else slots.decode({0: token})

    return step


class Engine(NamedTuple):
    """How to load a model, and how to begin to step it."""

    load: Callable[[Path], Any]
    start: Callable[[Any, Path], Step]


ENGINES = {
    "eager": Engine(load_transformers, start_eager),
    "make_fx": Engine(load_transformers, start_traced),
    "torch.compile": Engine(load_transformers, start_compiled),
    "AOTInductor": Engine(load_transformers, start_packaged),
    "kernels": Engine(load_tandem, partial(start_tandem, has_replay=False)),
    "replay": Engine(load_tandem, partial(start_tandem, has_replay=True)),
}


def token_at(position: int) -> int:
    """Return the token of a position: the same for every engine."""
    return 10 + position * 7 % 900


@torch.inference_mode()
def be_engine(name: str, folder: Path) -> None:
    """Start an engine and say what that took; then time a turn for each line that comes."""
    torch.set_num_threads(1)
    reference = start_eager(load_transformers(folder), folder)
    expected = [reference(token_at(position), position) for position in range(FIRST_STEPS)]
    model = ENGINES[name].load(folder)
    start = time.perf_counter()
    step = ENGINES[name].start(model, folder)
    found = [step(token_at(position), position).clone() for position in range(FIRST_STEPS)]
    seconds = time.perf_counter() - start
    for actual, wanted in zip(found, expected, strict=True):
        assert (actual - wanted).norm() <= TOLERANCE * wanted.norm(), f"{name}: other logits"
    print(json.dumps(seconds), flush=True)
    for turn, _ in enumerate(sys.stdin):
        seconds_of_steps = []
        for number in range(STEPS):
            position = FIRST_STEPS + turn * STEPS + number
            start = time.perf_counter()
            step(token_at(position), position)
            seconds_of_steps.append(time.perf_counter() - start)
        print(json.dumps(statistics.median(seconds_of_steps)), flush=True)


class EngineProcess:
    """An engine in a process of its own, as a context."""

    def __init__(self, name: str, folder: Path) -> None:
        """Start it; waits until it has done its first steps."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "--engine", name, "--folder", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")},
        )  # fmt: skip
        self.start_seconds = self._answer()

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def turn_seconds(self) -> float:
        """Return the median step of a turn."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(self._process.communicate()[1])
        seconds: float = json.loads(line)
        return seconds


def measure(names: list[str], folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Start every engine twice, then let them take turns."""
    found: dict[str, dict[str, float]] = {name: {} for name in names}
    for name in names:
        with EngineProcess(name, folder) as first:
            found[name]["first_start_seconds"] = first.start_seconds
            print(f"{name} started in {first.start_seconds:.1f} s", file=sys.stderr, flush=True)
    with ExitStack() as stack:
        running = {name: stack.enter_context(EngineProcess(name, folder)) for name in names}
        turns = [
            {name: engine.turn_seconds() for name, engine in running.items()} for _ in range(rounds)
        ]
        for name, engine in running.items():
            found[name]["later_start_seconds"] = engine.start_seconds
            found[name]["step_milliseconds"] = statistics.median(t[name] for t in turns) * 1e3
    return found


def save_model(folder: Path, layers: int) -> None:
    """Write the model, with weights at random."""
    torch.manual_seed(0)
    shape = find_shape("qwen3-30b-a3b")
    values = {**shape.values, **TINY, "num_hidden_layers": layers}
    config = AutoConfig.for_model(shape.model_type, **values)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=7, choices=range(1, MAX_ROUNDS + 1))
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        be_engine(options.engine, options.folder)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder, options.layers)
        found = measure(options.engines, folder, options.rounds)
    for name, row in found.items():
        print(
            f"{name:14} step {row['step_milliseconds']:7.2f} ms, start-up "
            f"{row['first_start_seconds']:7.2f} s, again {row['later_start_seconds']:6.2f} s"
        )
    if options.json:
        print(json.dumps({"layers": options.layers, "engines": found}))


if __name__ == "__main__":
    main()
