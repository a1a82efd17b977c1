"""Measures the documented ratios over llama.cpp (docs/comparison.md and docs/performance.md).

    python -m benchmarks.generation.claims                      # comparison.md's: hours; 19 GB
    python -m benchmarks.generation.claims "4 layers" experts   # minutes; 4.5 GB
    python -m benchmarks.generation.claims --all --json         # also GGUF files of seven shapes

NAME selects claims by the beginning of their names. Each runs its command from the documents and
prints its lines; then claim and measurement are printed side by side, with a verdict for this
machine. With `--json` the last line is one JSON object. The exit status is 1 if something could not
be measured. Needs the packages gguf and llama-cpp-python.
"""

import argparse
import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from tempfile import gettempdir
from typing import Any

from tandem.experts.store.host_memory import available_bytes

PEERS, KERNELS = "benchmarks.generation.against_peers", "benchmarks.kernels.peers"
PACKED = "--systems packed llama.cpp --vocabulary 32000"
FILE = (
    "--systems tandem llama.cpp --shape {} --quantisation {} --layers 4 --vocabulary 32000 "
    "--prompt 512 --steps 32 --rounds 3 --no-repacking"
)
HOLDS = 0.9  # of a claim: ratios vary by this much from run to run
LAYER_BYTES = 0.35e9  # of Qwen3-30B-A3B at four bits, by little the largest shape
OTHER_BYTES = 1.7e9  # programs, caches of keys and values, embeddings


@dataclass(frozen=True, slots=True)
class Claim:
    """The documented result of a command: prefill and decode, or experts at 1 to 256 tokens."""

    name: str
    flags: str
    numbers: str  # as the documents have them
    module: str = PEERS
    depth: int = 0
    layers: int = 4
    is_in_comparison: bool = True

    @property
    def ratios(self) -> list[float]:
        """The documented numbers."""
        return [float(number) for number in self.numbers.split(" / ")]

    @property
    def needed_bytes(self) -> float:
        """The memory that its systems take."""
        copies = 1 if "--one-at-a-time" in self.flags else 2
        return copies * self.layers * LAYER_BYTES + OTHER_BYTES


def experts(format_name: str, numbers: str) -> Claim:
    """Return a claim about a layer's experts alone."""
    flags = f"--format {format_name} --tokens 1,4,64,256 --json"
    return Claim(f"experts in {format_name}", flags, numbers, module=KERNELS)


def file(shape: str, quantisation: str, numbers: str) -> Claim:
    """Return a claim about four layers in a GGUF file."""
    flags = FILE.format(shape, quantisation)
    return Claim(f"file of {shape} in {quantisation}", flags, numbers, is_in_comparison=False)


LONG = f"{PACKED} --layers 4 --depth 4096 16384 --rounds 2 --steps 32"
CLAIMS = (
    Claim("4 layers", f"{PACKED} --layers 4 --rounds 4 --steps 48", "3.04 / 1.14"),
    Claim("behind 4096 tokens, 4 layers", LONG, "3.46 / 2.22", depth=4096),
    Claim("behind 16384 tokens, 4 layers", LONG, "3.72 / 3.17", depth=16384),
    experts("bf16", "1.11 / 1.63 / 2.97 / 2.88"),
    experts("int4-g32", "1.12 / 3.23 / 4.49 / 4.43"),
    experts("mxfp4", "1.98 / 5.79 / 7.65 / 7.24"),
    Claim(
        "48 layers",
        f"{PACKED} --layers 48 --one-at-a-time --rounds 2 --steps 48",
        "3.90 / 1.24",
        layers=48,
    ),
    file("qwen3-30b-a3b", "Q4_K_M", "1.75 / 1.65"),
    file("qwen3-30b-a3b", "Q6_K", "2.02 / 1.46"),
    file("qwen3-30b-a3b", "IQ4_XS", "1.90 / 2.13"),
    file("qwen3-30b-a3b", "NVFP4", "7.32 / 2.60"),
    file("qwen3-30b-a3b", "Q4_0", "5.42 / 2.30"),
    file("lfm2-8b-a1b", "Q4_0", "3.87 / 2.56"),
    file("gemma4-26b-a4b", "Q4_0", "5.93 / 1.94"),
    file("nemotron-3-nano", "Q4_0", "5.16 / 1.82"),
    file("qwen3.6-35b-a3b", "Q4_0", "5.21 / 1.97"),
)


def why_not(
    claims: Sequence[Claim], memory_bytes: float, disk_bytes: float, missing: Sequence[str]
) -> str | None:
    """Return one sentence why the claims cannot be measured here; None: they can."""
    if not claims:
        return f"no claim of this name; expected one of {', '.join(c.name for c in CLAIMS)}"
    if missing:
        return f"missing: {', '.join(missing)}; run `pip install gguf llama-cpp-python`"
    largest = max(claims, key=lambda claim: claim.needed_bytes)
    if largest.needed_bytes > memory_bytes:
        return (
            f"'{largest.name}' takes {largest.needed_bytes / 1e9:.1f} GB of memory and "
            f"{memory_bytes / 1e9:.1f} GB are free; end other programs, or name the others"
        )
    file_bytes = max(claim.layers for claim in claims) * LAYER_BYTES + OTHER_BYTES
    if file_bytes > disk_bytes:
        return (
            f"the file for '{largest.name}' takes {file_bytes / 1e9:.1f} GB and "
            f"{disk_bytes / 1e9:.1f} GB are free in {gettempdir()}; set TMPDIR to another folder"
        )
    return None


def run(module: str, flags: str) -> dict[str, Any]:
    """Run a command, print its lines, and return the last one; raises OSError if it fails."""
    command = [sys.executable, "-m", module, *shlex.split(flags)]
    print("$ python", *command[1:], file=sys.stderr, flush=True)
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = line
            if not line.startswith("{"):
                print(f"  {line}", end="", file=sys.stderr, flush=True)
    if process.returncode != 0:
        raise OSError(f"it ended with {process.returncode}")
    found: dict[str, Any] = json.loads(last)
    return found


def measured(claim: Claim, report: dict[str, Any]) -> list[float]:
    """Return the ratios over llama.cpp in a command's report, in the claim's order."""
    if claim.module == KERNELS:
        cases = [case for case in report.get("cases", ()) if case["peer"] == "llama.cpp"]
        return [case["ratio"] for case in sorted(cases, key=lambda case: int(case["tokens"]))]
    for row in report.get("speeds", ()):
        if row["system"].startswith("llama.cpp") and row["depth"] == claim.depth:
            return [*row["ratios"]]
    raise OSError("its report has no row of llama.cpp")


def verdict(claim: Claim, found: Sequence[float]) -> str:
    """Return whether a claim holds here, as text."""
    if len(found) < len(claim.ratios):
        return "not measured"
    pairs = zip(found, claim.ratios, strict=True)
    shares = [ratio / claimed for ratio, claimed in pairs]
    return "holds" if min(shares) >= HOLDS else f"does not hold: {min(shares):.2f} of it"


def missing_packages() -> list[str]:
    """Return the required packages that are not installed."""
    names = {"gguf": "gguf", "llama_cpp": "llama-cpp-python"}
    return [name for module, name in names.items() if importlib.util.find_spec(module) is None]


def compare(claims: Sequence[Claim]) -> list[dict[str, Any]]:
    """Measure claims and print each result at once; claims with the same command share its run."""
    reports: dict[str, dict[str, Any]] = {}
    rows = []
    for claim in claims:
        found: list[float] = []
        try:
            if claim.flags not in reports:
                reports[claim.flags] = {}  # if it fails, it is not run again
                reports[claim.flags] = run(claim.module, claim.flags)
            found = measured(claim, reports[claim.flags])
        except OSError as error:
            print(f"{claim.name}: {error}", file=sys.stderr, flush=True)
        here, judgement = " / ".join(f"{ratio:.2f}" for ratio in found), verdict(claim, found)
        print(f"{claim.name:<34} {claim.numbers:<26} {here:<26} {judgement}", flush=True)
        rows.append({**asdict(claim), "measured": found, "verdict": judgement})
    return rows


def main() -> int:
    """Measure, and print claims beside measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--all", action="store_true", help="those of performance.md alone, too")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    claims = [
        claim
        for claim in CLAIMS
        if claim.name.startswith(tuple(options.names) or "")
        and (claim.is_in_comparison or options.all or options.names)
    ]
    disk_bytes = shutil.disk_usage(gettempdir()).free
    reason = why_not(claims, available_bytes(), disk_bytes, missing_packages())
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    print(f"{'over llama.cpp':<34} {'claim':<26} {'here':<26} verdict", flush=True)
    rows = compare(claims)
    if options.json:
        print(json.dumps({"claims": rows}))
    return int(any(row["verdict"] == "not measured" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
