"""Tests that docs/performance.md shows docs/figures.jsonl, with valid commands."""

import argparse
import importlib
import json
import re
import shlex
import sys
from pathlib import Path
from string import Formatter
from typing import Any

import pytest
from benchmarks import report
from benchmarks.report import (
    DOCUMENT,
    Row,
    changed,
    last_object,
    read_rows,
    with_tables,
    write_rows,
)

from tandem.cli.parser import parse

ROWS = read_rows(report.FIGURES)
TEXT = DOCUMENT.read_text(encoding="utf-8")
DATES = re.compile(r"\d{4}-\d\d-\d\d(; \d{4}-\d\d-\d\d)?")
# What a reader puts in by hand; brackets are options that may be left out.
PLACEHOLDERS = {
    "SHAPE": "qwen3-30b-a3b", "TYPE": "Q4_0", "ISA": "avx2", "[": "", "]": "",
    "LLAMA_BENCH": sys.executable,  # any program
}  # fmt: skip
ROW = Row(
    table="Disk", what="reads", figure="1", machine="EPYC", date="2026-11-01", command="tandem"
)


class Parsed(BaseException):
    """Raised where a program has parsed its command line."""


def test_tables_are_up_to_date() -> None:
    assert report.main(["--check"]) == 0, "run `python -m benchmarks.report`"


def test_performance_has_few_lines() -> None:
    assert len(TEXT.splitlines()) <= 200


def test_each_figure_has_a_known_machine_a_date_and_a_template_that_can_be_filled() -> None:
    machines, _, _ = TEXT.partition("\n## Kernels\n")
    assert len(ROWS) > 70
    for row in ROWS:
        assert all(f"| {name} |" in machines for name in row.machine.split("; again ")), row
        assert DATES.fullmatch(row.date), row
        assert [*Formatter().parse(row.template)] or not row.template


@pytest.mark.parametrize("command", sorted({row.command for row in ROWS}))
def test_commands_of_figures_are_accepted(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PLACEHOLDERS.items():
        command = re.sub(rf"\b{name}\b" if name.isalpha() else re.escape(name), value, command)
    words = shlex.split(command)
    if words[0].startswith("TANDEM_ISA="):
        words = words[1:]
    if words[0] == "tandem":
        parse(words[1:])
        return
    assert words[:2] == ["python", "-m"]
    with pytest.raises(Parsed):
        _read_command_line(words[2], words[3:], monkeypatch)


def _read_command_line(name: str, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a program until it has parsed its options."""
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{name}.__main__")
    whole, parsers = argparse.ArgumentParser.parse_known_args, list[argparse.ArgumentParser]()

    def parse_known_args(parser: argparse.ArgumentParser, *words: Any) -> Any:
        parsers.append(parser)  # a subcommand's parser is called by the first one
        known, unknown = whole(parser, *words)
        if parser is parsers[0]:
            assert unknown == []
            raise Parsed
        return known, unknown

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
    monkeypatch.setattr(sys, "argv", [name, *flags])
    module.main()


def test_rows_stand_in_their_tables_and_heads_stay() -> None:
    document = "## Disk\ntext\n\n| what | f |\n|---|---|\n| old | 1 |\n\n## Other\n| a |\n|---|\n"
    line = "| reads | 1 | | EPYC | 2026-11-01 | `tandem` |\n"
    assert with_tables(document, [ROW]) == document.replace("| old | 1 |\n", line)
    with pytest.raises(ValueError, match="no table under a heading 'Disk'"):
        with_tables("## Disk\n\n## Other\n| a |\n|---|\n", [ROW])


def test_a_row_takes_its_figure_from_an_output() -> None:
    output = 'a table\n{"cells": [{"ratio": 0.123}]}\n'
    (row,) = changed([ROW], "rea", {"template": "{cells[0][ratio]:.1%}"}, output)
    assert (row.what, row.figure, row.machine) == ("reads", "12.3%", "EPYC")
    for wrong in ("{worst}", "{cells[1]}", "{cells[no]}"):
        with pytest.raises(ValueError, match="the output has no"):
            changed([ROW], "rea", {"template": wrong}, output)
    with pytest.raises(ValueError, match="no template"):
        changed([ROW], "rea", {}, output)
    with pytest.raises(ValueError, match="ends with a JSON object"):
        last_object("a table\n")


def test_a_row_is_added_to_its_table() -> None:
    other = Row(table="GGUF", what="b", figure="2", machine="Xeon", date="", command="tandem")
    new = {"table": "Disk", "figure": "3", "machine": "Xeon", "date": "", "command": "tandem"}
    rows = changed([ROW, other], "writes", new, "")
    assert [row.what for row in rows] == ["reads", "writes", "b"]
    with pytest.raises(ValueError, match="needs --table, --machine, --date, --command"):
        changed([ROW], "writes", {"figure": "3"}, "")
    with pytest.raises(ValueError, match="2 rows begin with 're'"):
        changed([ROW, ROW], "re", {"figure": "3"}, "")


def test_the_command_changes_data_and_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, document = tmp_path / "figures.jsonl", tmp_path / "performance.md"
    write_rows([ROW], figures)
    document.write_text("## Disk\n| what |\n|---|\n")
    monkeypatch.setattr(report, "FIGURES", figures)
    monkeypatch.setattr(report, "DOCUMENT", document)
    assert report.main(["--check"]) == 1
    assert report.main(["--what", "reads", "--figure", "2 GB/s"]) == 0
    assert "| reads | 2 GB/s | | EPYC | 20" in document.read_text()
    assert json.loads(figures.read_text())["figure"] == "2 GB/s"
    assert report.main(["--check"]) == 0
    assert report.main(["--what", "writes"]) == 1
    assert "needs --table" in capsys.readouterr().err
