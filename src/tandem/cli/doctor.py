"""`tandem doctor`: reports what is installed, what is missing, its cost in speed, and remedies.

`tandem doctor MODEL` also checks on this machine that the kernels agree with the reference.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.cli.keeping import cache_dir, kept_copies
from tandem.cli.model_choice import (
    ModelChoice,
    add_model,
    find_model,
    import_transformers,
    source_label,
)
from tandem.cli.progress import shows_progress
from tandem.core.config import add_flags, from_flags, option
from tandem.core.errors import CapacityError, ModelError, TandemError
from tandem.devices import kind_of
from tandem.forecast.windows_check import Finding

if TYPE_CHECKING:
    from tandem.forecast.report.stages import Outcome, Stage
    from tandem.hf.checkpoint import AnyCheckpoint

EXIT_BROKEN = 1
_MARKS = {"good": "ok  ", "slow": "slow", "broken": "FAIL"}
_OUTCOME_MARKS = {"ok": "ok  ", "not here": "none", "failed": "FAIL"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Options of `tandem doctor`."""

    expert_dtype: str = option(
        "auto", help="expert format in which to check MODEL", metavar="DTYPE"
    )
    threads: int | None = option(None, help="see tandem run --help-all", metavar="N")
    report: str | None = option(
        None,
        help="also try what Tandem needs, compare forecasts with measurements, and write all of it "
        "to FILE, without private data, for an issue; takes some minutes",
        metavar="FILE",
    )
    json: bool = option(False, help="print one JSON object on the last line of standard output")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tandem doctor`."""
    add_model(
        parser, default=None, help="also check this model: its files, and the kernels on them"
    )
    add_flags(parser, DoctorOptions)


def run(flags: argparse.Namespace) -> int:
    """Check everything and print the findings; returns 1 if something is broken."""
    options = from_flags(DoctorOptions, flags)
    import_transformers(quiet=False, has_bars=False)
    if options.report is not None:
        from tandem.forecast.report.document import FIRST_LINE
        from tandem.forecast.report.record import require_writable

        require_writable(Path(options.report), FIRST_LINE, "report")

    findings = list(looked_at(options.threads))
    more = (
        _check_disk_of_copies()
        if flags.model is None
        else _check_model(from_flags(ModelChoice, flags), options)
    )
    for finding in more:
        findings.append(finding)
        _print(finding)
    outcomes = [] if options.report is None else _report(Path(options.report), findings)
    if options.json:
        found = {"findings": [asdict(finding) for finding in findings]}
        print(json.dumps(found | {"tried": [asdict(outcome) for outcome in outcomes]}))
    is_broken = any(finding.state == "broken" for finding in findings)
    return EXIT_BROKEN if is_broken or any(one.state == "failed" for one in outcomes) else 0


def _report(path: Path, findings: list[Finding]) -> "list[Outcome]":
    """Run the report's stages, print their outcomes, and write the report; return the outcomes."""
    from tandem.cli.version import version_lines
    from tandem.forecast.report.cpu_stages import CPU_STAGES
    from tandem.forecast.report.document import write_report
    from tandem.forecast.report.gpu_stages import GPU_STAGES
    from tandem.forecast.report.record import Record
    from tandem.forecast.report.speed_stages import CPU_SPEED_STAGES, GPU_SPEED_STAGES

    gpu = has_gpu()
    smoke = tried((*CPU_STAGES, *GPU_STAGES) if gpu else CPU_STAGES)
    speeds = tried(GPU_SPEED_STAGES if gpu else CPU_SPEED_STAGES)
    record = Record(versions=version_lines(), findings=findings, speeds=speeds, smoke=smoke)
    write_report(path, record)
    print(f"wrote {path}: read it, then attach it to an issue")
    return [*smoke, *speeds]


def tried(stages: "Sequence[Stage]") -> "list[Outcome]":
    """Run stages, print the outcome of each, and return the outcomes."""
    from tandem.forecast.report.stages import Stage, run_stages

    def begin(stage: Stage) -> None:
        print(f"     {stage.name} ...", file=sys.stderr, flush=True)

    outcomes = []
    for outcome in run_stages(stages, begin):
        outcomes.append(outcome)
        print(f"{_OUTCOME_MARKS[outcome.state]} {outcome.name:<18} {outcome.said.text}")
    return outcomes


def has_gpu() -> bool:
    """Tell whether CUDA is usable."""
    try:
        kind_of("cuda").require()
    except CapacityError:
        return False
    return True


def looked_at(num_threads: int | None = None) -> "Iterator[Finding]":
    """Check this machine; print and yield each finding as soon as it is known."""
    from tandem.forecast.machine_check import check_machine

    isa = os.environ.get("TANDEM_ISA", "")
    for finding in check_machine(cache_dir(), num_threads=num_threads, isa=isa):
        _print(finding)
        yield finding


def _print(finding: Finding) -> None:
    remedy = f"\n       -> {finding.remedy}" if finding.remedy else ""
    print(f"{_MARKS[finding.state]} {finding.what:<18} {finding.found}{remedy}", flush=True)


def _check_model(choice: ModelChoice, options: DoctorOptions) -> Iterator[Finding]:
    from tandem.forecast.machine_check import check_model_files, check_model_kernels
    from tandem.forecast.windows_check import check_place
    from tandem.hf.checkpoint import open_model
    from tandem.hf.config import OffloadConfig

    found = find_model(choice, quiet=True)
    offload = OffloadConfig(
        expert_dtype=options.expert_dtype,
        threads=options.threads,
        isa=os.environ.get("TANDEM_ISA"),
    )
    yield from check_place("the model", Path(found.model))
    try:
        checkpoint = open_model(Path(found.model), may_run_code=found.trust_remote_code)
        yield check_model_files(checkpoint, has_progress=shows_progress())
        yield from _check_disk(checkpoint)
        yield from _check_copies(source_label(choice.model, Path(found.model)))
        yield check_model_kernels(checkpoint, offload)
    except ModelError as error:
        yield Finding("model", "broken", str(error))


def _check_disk(checkpoint: "AnyCheckpoint") -> Iterator[Finding]:
    """Yield a finding on the disk that holds a packed model; nothing for other models."""
    from tandem.forecast.disk_check import check_disk
    from tandem.hf.checkpoint import Checkpoint

    if isinstance(checkpoint, Checkpoint) and checkpoint.is_packed:
        yield from filter(None, [check_disk(checkpoint)])


def _check_disk_of_copies() -> Iterator[Finding]:
    """Measure the disk of the packed copies by reading the most recently used copy."""
    from tandem.hf.checkpoint import open_model

    for copy in kept_copies().all()[:1]:
        try:
            yield from _check_disk(open_model(copy.directory))
        except TandemError:
            continue  # `tandem doctor MODEL` reports the error


def _check_copies(source: str) -> Iterator[Finding]:
    """Verify the checksums of all packed copies of a model; yield a finding for each copy."""
    from tandem.forecast.machine_check import check_model_files
    from tandem.hf.checkpoint import open_model

    for copy in kept_copies().all():
        if copy.source != source:
            continue
        try:
            finding = check_model_files(open_model(copy.directory), has_progress=shows_progress())
            yield replace(finding, what="packed copy", found=f"{copy.name}: {finding.found}")
        except TandemError as error:
            remedy = f"tandem models rm {copy.name}; the next start writes it again"
            yield Finding("packed copy", "broken", str(error), remedy)
