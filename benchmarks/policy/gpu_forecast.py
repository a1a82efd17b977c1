"""What `tandem plan` forecasts for common PCs: `python -m benchmarks.policy.gpu_forecast`.

Writes docs/gpu-forecast.md (`make docs-forecast`). Each number is the output of

    tandem plan --shape SHAPE --expert-dtype FORMAT --device cuda --profile PROFILE --host-path PATH

with the context that the command plans for. Nothing is loaded, and no GPU is used.
"""

import contextlib
import io
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tandem.cli.main import main as tandem
from tandem.hardware.profiles import load_profile
from tandem.policy.cost import HardwareProfile

PAGE = Path(__file__).parents[2] / "docs" / "gpu-forecast.md"
PATHS = ("segments", "graph")
PROFILES = ("laptop-8gb", "ddr4-12gb", "desktop-12gb", "desktop-16gb", "desktop-24gb")


class Model(NamedTuple):
    """A released model in the form in which people run it."""

    name: str
    shape: str
    expert_dtype: str


# The most popular models that such a PC can hold, in formats of their usual files' size.
MODELS = (
    Model("Qwen3.6-35B-A3B", "qwen3.6-35b-a3b", "int4"),
    Model("Qwen3-30B-A3B, Qwen3-Coder-30B", "qwen3-30b-a3b", "int4"),
    Model("Gemma-4-26B-A4B", "gemma4-26b-a4b", "int4"),
    Model("gpt-oss-20b", "gpt-oss-20b", "mxfp4"),
    Model("LFM2.5-8B-A1B", "lfm2-8b-a1b", "int4"),
    Model("Qwen3-Coder-Next 80B-A3B", "qwen3-next-80b-a3b", "int4"),
)

INTRODUCTION = """\
# GPU speeds: a forecast, not measurements

Written by `make docs-forecast` (`python -m benchmarks.policy.gpu_forecast`); do not edit by hand.

No number here was measured on a GPU. Each is the output of
`tandem plan --shape SHAPE --expert-dtype FORMAT --device cuda --profile PROFILE --host-path PATH`:
Tandem's own planner on the virtual clock, at batch 1, with the slots that the card's memory leaves,
a prompt of {prompt} tokens, a context of 4,096, and routing as models have it on average. Times
come from a profile of bandwidths and peaks in data sheets and papers, scaled by bytes for a model
that the profile lacks. Ratios mean more than absolutes.

The times include the host's own work. "Graph" is how device `cuda` decodes where driver and card
allow it: a whole step is one graph ([runtime.md](runtime.md)). The host's part of it was measured
on a CPU twin; the card's part is assumed. "Segments" is the other way: graph segments with Python
between them at every layer. Each decides as it does in real runs. A graph's decode steps leave
every miss to the CPU (`ready-on-gpu`) or fetch some (`balanced-in-graph`), as a trial decides;
planned steps fetch some (`balanced`) and prefetch. "Hits" are the active experts that run from the
card's memory.
"""


def answer(words: list[str]) -> dict[str, Any]:
    """Return the JSON of a `tandem` command, which is given without --json."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = tandem([*words, "--json"])
    if code != 0:
        raise SystemExit(code)
    found: dict[str, Any] = json.loads(out.getvalue().splitlines()[-1])
    return found


def plan(model: Model, profile: str, path: str) -> dict[str, Any]:
    """Return the JSON of `tandem plan`."""
    words = ["--shape", model.shape, "--expert-dtype", model.expert_dtype]
    return answer(["plan", *words, "--device", "cuda", "--profile", profile, "--host-path", path])


def heading(profile: HardwareProfile) -> str:
    """Return a description of a machine."""
    link, memory = profile.link_bytes_per_second / 1e9, profile.host_memory_bytes >> 30
    return (
        f"{profile.gpu} ({profile.gpu_memory_bytes >> 30} GB), {link:.0f} GB/s to it, "
        f"{profile.cpu}, {memory} GB"
    )


def rows(name: str) -> Iterator[str]:
    """Yield the lines of one machine."""
    profile = load_profile(name)
    source = profile.source.split(" Host costs:")[0]
    yield f"\n## {heading(profile)}\n\n{textwrap.fill(f'Profile `{name}`. {source}', 100)}\n"
    yield "| model | experts on the card | hits, segments / graph | prompt tok/s | decode tok/s |"
    yield "|---|---|---|---|---|"
    for model in MODELS:
        print(f"{name}, {model.name}", file=sys.stderr)
        yield row(model, [plan(model, name, path) for path in PATHS])


def row(model: Model, found: list[dict[str, Any]]) -> str:
    """Return a model's line."""
    one = found[0]
    needs, has = (one[key] / 1e9 for key in ("host_bytes", "host_available_bytes"))
    if not one["fits"]:
        return f"| {model.name} | needs {needs:.0f} GB of host memory, {has:.0f} are free | | | |"
    share = one["expert_slots"] / one["experts"]
    hits = " / ".join(f"{each['hit_rate']:.0%}" for each in found)
    prompt = " / ".join(f"{each['prefill_tokens_per_second']:.0f}" for each in found)
    decode = " / ".join(f"{each['decode_tokens_per_second']:.0f}" for each in found)
    return f"| {model.name} | {share:.0%} | {hits} | {prompt} | {decode} |"


def main() -> int:
    """Write the page."""
    from tandem.forecast.speed_forecast import PROMPT_TOKENS

    lines = [line for name in PROFILES for line in rows(name)]
    text = INTRODUCTION.format(prompt=PROMPT_TOKENS) + "\n".join(lines) + "\n"
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
