"""The file of `tandem doctor --report`: Markdown to read, with JSON at its end."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from tandem.forecast.report.record import Record, write_whole
from tandem.forecast.report.stages import Outcome
from tandem.forecast.windows_check import Finding

FIRST_LINE = "# Report of `tandem doctor`"


def write_report(path: Path, record: Record) -> None:
    """Write the anonymous record atomically; raises `ConfigError` if the file cannot be written."""
    record = record.anonymous()
    lines = [FIRST_LINE, "", *(f"- {version}" for version in record.versions), ""]
    lines += ["## This machine", "", *_findings(record.findings), ""]
    lines += ["## What works", "", *_outcomes(record.smoke), ""]
    lines += ["## Forecast and measured", "", *_outcomes(record.speeds), ""]
    lines += ["<details><summary>The same for programs</summary>", "", "```json"]
    lines += [json.dumps(asdict(record)), "```", "</details>", ""]
    write_whole(path, "\n".join(lines))


def _findings(findings: Sequence[Finding]) -> Iterator[str]:
    yield "| what | state | found | what to do |"
    yield "|---|---|---|---|"
    for finding in findings:
        found, remedy = _cell(finding.found), _cell(finding.remedy)
        yield f"| {finding.what} | {finding.state} | {found} | {remedy} |"


def _outcomes(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield "| what | state | seconds | found |"
    yield "|---|---|---|---|"
    for outcome in outcomes:
        found = _cell(outcome.said.text)
        yield f"| {outcome.name} | {outcome.state} | {outcome.seconds:.1f} | {found} |"
    for outcome in outcomes:
        if outcome.details:
            yield from ("", f"{outcome.name}:", "", "```text", outcome.details, "```")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
