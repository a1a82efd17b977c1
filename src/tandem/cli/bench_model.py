"""`tandem bench [MODEL]` and `tandem bench --shape NAME`: a whole model against the ceilings."""

import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from tandem.core.config import option, require_range
from tandem.devices import DEVICES, kind_of
from tandem.devices.options import OffloadOptions
from tandem.foreign_types import PreTrainedModel

if TYPE_CHECKING:
    from tandem.bench.generation import Measured, Speed, Workload
    from tandem.bench.kernels import Ceiling
    from tandem.cli.model_choice import ModelChoice

_DEFAULT_SHAPE = "qwen3-30b-a3b"
_DTYPE_OF_SHAPE = "int4"  # the format of most weights
_DEVICES = [name for name in DEVICES if not kind_of(name).holds_dense_parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBenchOptions:
    """Options of `tandem bench` for a model."""

    shape: str | None = option(
        None, help="shape of a released model, with random weights", metavar="NAME"
    )
    layers: int | None = option(
        None, help="number of layers of the shape (default: all)", metavar="N"
    )
    vocabulary: int | None = option(None, help="vocabulary size of the shape", metavar="N")
    expert_dtype: str | None = option(
        None,
        help="format of the experts (default: int4 of a shape, whose linear layers have it if it "
        "is dense; a model's own)",
        metavar="DTYPE",
    )  # fmt: skip
    dense_dtype: str = option("auto", help="format of linear layers: none, auto, bf16, int8, int4")
    kv_dtype: str = option("auto", help="keys and values of earlier tokens: auto, bf16, int8")
    device: str = option("cpu", help=" or ".join(_DEVICES), choices=_DEVICES)
    prompt: int = option(512, help="number of tokens of the prompt", metavar="N")
    gen: int = option(64, help="decode steps", metavar="N")
    batch: int = option(1, help="number of sequences in the batch", metavar="N")
    depth: int = option(0, help="tokens in the KV cache before the prompt", metavar="N")
    replay: str | None = option(None, help="route tokens as this trace does", metavar="TRACE")
    threads: int | None = option(
        None, help="CPU threads (default: one for each fast core)", metavar="N"
    )
    compile: bool = option(True, help="record decode steps and replay them")
    verbose: bool = option(
        False, help="also print what limits the speed, and where a step's time goes"
    )
    json: bool = option(False, help="print one JSON object on the last line of standard output")

    def __post_init__(self) -> None:
        """Check the ranges."""
        values = asdict(self)
        for name in ("prompt", "gen", "batch"):
            require_range(name, values[name], 1, what="a number")
        require_range("depth", self.depth, 0, what="a number of tokens")
        for name in ("layers", "vocabulary", "threads"):
            if (value := values[name]) is not None:
                require_range(name, value, 1, what="a number")


def run_model(options: ModelBenchOptions, choice: "ModelChoice | None") -> int:
    """Measure and print the results; returns the exit code."""
    from tandem.bench.generation import Workload, ceiling_of, measure, measure_machine
    from tandem.bench.kernels import KernelBench
    from tandem.cli.explain import decode_step
    from tandem.experts.execution.forced_routing import ForcedRouting
    from tandem.generate.generator import Generator
    from tandem.hf.runtime import require_runtime
    from tandem.kernels.cpu import detect_cpu
    from tandem.trace import read_trace

    cpu = detect_cpu()
    isa = os.environ.get("TANDEM_ISA", "")
    num_threads = options.threads or cpu.num_threads
    offload = OffloadOptions(
        expert_dtype=options.expert_dtype or "auto", threads=num_threads, device=options.device
    )
    # Read the trace before building the model, which takes long.
    trace = read_trace(options.replay) if options.replay is not None else None
    name, model = _model(options, choice, offload)
    if trace is not None:
        runtime = require_runtime(model)
        runtime.use(ForcedRouting(runtime.executor, trace))
    bench = KernelBench(num_threads=num_threads, isa=isa)
    machine = measure_machine(bench)
    generator = Generator(model, kv_dtype=options.kv_dtype, has_replay=options.compile)
    work = Workload(
        prompt_tokens=options.prompt, new_tokens=options.gen, batch=options.batch,
        depth=options.depth,
    )  # fmt: skip
    measured = measure(model, generator, work, bench)
    machine = replace(machine, read_gigabytes_per_second=measured.read_gigabytes_per_second)
    ceiling = ceiling_of(model, work, machine, measured.step_bytes)
    print(f"{cpu.model_name}, {num_threads} threads, {bench.engine.isa}")
    _print(ceiling, measured)
    if generator.why_slower is not None:
        print(f"slower than possible: {generator.why_slower}")
    step = decode_step(generator)
    if options.verbose:
        _print_details(machine, measured)
        print(step.line())
    if options.json:
        processor = {"processor": f"{cpu.model_name}, {num_threads} threads"}
        report = _report(name, model, work, ceiling, measured)
        print(json.dumps(report | processor | step.json()))
    return 0


def _model(
    options: ModelBenchOptions,
    choice: "ModelChoice | None",
    offload: OffloadOptions,
) -> tuple[str, PreTrainedModel]:
    from tandem.bench.model_shapes import find_shape
    from tandem.bench.random_model import build_random_model
    from tandem.hf.config import OffloadConfig

    if choice is None:
        name = options.shape or _DEFAULT_SHAPE
        shape, dense_dtype = find_shape(name), options.dense_dtype
        print(f"building {name} with random weights", file=sys.stderr, flush=True)
        if not shape.has_experts and dense_dtype == "auto":
            dense_dtype = _DTYPE_OF_SHAPE
        elif shape.has_experts and options.expert_dtype is None:
            offload = replace(offload, expert_dtype=_DTYPE_OF_SHAPE)
        config = OffloadConfig(**asdict(offload), isa=os.environ.get("TANDEM_ISA") or None)
        return name, build_random_model(
            shape, config, dense_dtype=dense_dtype, num_layers=options.layers,
            vocabulary=options.vocabulary,
        )  # fmt: skip
    from tandem.cli.model_choice import load_model

    model = load_model(choice, offload, quiet=False, dense_dtype=options.dense_dtype)
    return choice.model, model


def _print(ceiling: "Speed", measured: "Measured") -> None:
    print(
        f"ceiling of this machine's memory and arithmetic: prefill "
        f"{ceiling.prefill_tokens_per_second:.0f} tok/s, decode "
        f"{ceiling.decode_tokens_per_second:.1f} tok/s"
    )
    speed = measured.speed
    prefill = speed.prefill_tokens_per_second / ceiling.prefill_tokens_per_second
    print(f"time to first token {measured.time_to_first_token_seconds * 1e3:.0f} ms")
    print(f"prefill {speed.prefill_tokens_per_second:8.1f} tok/s  {prefill:4.0%} of the ceiling")
    print(
        f"decode  {speed.decode_tokens_per_second:8.1f} tok/s  {measured.decode_share:4.0%} "
        "of the ceiling, read between steps"
    )


def _print_details(machine: "Ceiling", measured: "Measured") -> None:
    print(
        f"read {machine.read_gigabytes_per_second:.1f} GB/s, int4 {machine.int4_gops:.0f} and int8 "
        f"{machine.int8_gops:.0f} Gop/s; a decode step touches {measured.step_bytes / 1e6:.0f} MB"
    )
    parts = "  ".join(f"{part} {value:.2f}" for part, value in measured.milliseconds.items())
    print(f"milliseconds of a decode step: {parts}")


def _report(
    name: str, model: PreTrainedModel, work: "Workload", ceiling: "Speed", measured: "Measured"
) -> dict[str, object]:
    return {
        "shape": name,
        "layers": model.config.get_text_config().num_hidden_layers,
        "batch": work.batch,
        "depth": work.depth,
        "ceiling": asdict(ceiling),
        "time_to_first_token_seconds": measured.time_to_first_token_seconds,
        **asdict(measured.speed),
        "decode_share_of_ceiling": measured.decode_share,
        "step_bytes": measured.step_bytes,
        "milliseconds": measured.milliseconds,
    }
