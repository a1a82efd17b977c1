"""`tandem trace record`: runs prompts and writes the routers' choices as a routing trace."""

import argparse
import json
import sys
from dataclasses import dataclass

from tandem.cli.model_choice import ModelChoice, add_model, load_model_and_tokenizer
from tandem.cli.prompts import read_prompts
from tandem.core.config import add_flags, from_flags, option, require_range
from tandem.core.errors import ConfigError
from tandem.devices.options import OffloadOptions, offload_options


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Options of a recording, except those of loading and running the model."""

    limit: int = option(1 << 30, help="maximum number of prompts to run from the file", metavar="N")
    max_new_tokens: int = option(64, help="tokens to generate for each prompt", metavar="N")
    seed: int = option(0, help="seed of the sampling", metavar="N")
    json: bool = option(False, help="print one JSON object on the last line of standard output")

    def __post_init__(self) -> None:
        """Check the ranges."""
        require_range("limit", self.limit, 1)
        require_range("max_new_tokens", self.max_new_tokens, 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tandem trace`."""
    parser.add_argument("action", choices=("record",), metavar="record", help="write a new trace")
    add_model(parser, loads=True)
    parser.add_argument(
        "--prompts", required=True, metavar="FILE", help="file of prompts: text or JSON"
    )
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="trace (.npz)")
    add_flags(parser, OffloadOptions)
    add_flags(parser, TraceOptions)


def run(flags: argparse.Namespace) -> int:
    """Record a trace; returns the exit code."""
    options = from_flags(TraceOptions, flags)
    offload = offload_options(flags)
    if not flags.output.endswith(".npz"):
        raise ConfigError(f"--output is {flags.output!r}; expected a name that ends in .npz")
    prompts = read_prompts(flags.prompts)[: options.limit]
    model, tokenizer = load_model_and_tokenizer(from_flags(ModelChoice, flags), offload, quiet=True)

    from tandem.bench.routing_recording import recording
    from tandem.generate.generator import Generator
    from tandem.trace import write_trace

    with recording(model) as recorder:
        for prompt in prompts:
            # Each sequence gets its own generator, so nothing of the previous one is reused. The
            # steps with which the generator tries the model do not belong to the sequence.
            generator = Generator(model, tokenizer)
            recorder.pause()
            generator.prepare()
            recorder.begin_sequences()
            messages = [{"role": "user", "content": prompt}]
            generator.generate([messages], max_new_tokens=options.max_new_tokens, seed=options.seed)
            print(".", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        trace = recorder.trace(flags.model)
    write_trace(flags.output, trace)
    summary = {
        "trace": flags.output,
        "model": trace.meta.model,
        "sequences": trace.num_sequences,
        "tokens": trace.num_tokens,
        "moe_layers": trace.meta.n_moe_layers,
        "experts": trace.meta.n_experts,
        "top_k": trace.meta.top_k,
        "predictors": list(trace.meta.predictors),
    }
    print(
        f"{flags.output}: {trace.num_sequences} sequences, {trace.num_tokens} tokens, "
        f"{trace.meta.n_moe_layers} layers of {trace.meta.n_experts} experts"
    )
    if options.json:
        print(json.dumps(summary))
    return 0
