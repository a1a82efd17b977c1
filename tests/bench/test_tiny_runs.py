"""Commands of docs/performance.md at tiny size: their last line fills the rows' templates."""

import importlib
import sys

import pytest
from benchmarks.report import FIGURES, last_object, read_rows

ROWS = read_rows(FIGURES)
COMMANDS = (
    "benchmarks.loading.quantise --rounds 1",
    "benchmarks.policy.prompts --prompt 16",
    "benchmarks.policy.graph_rules --limit 4",
    "benchmarks.runtime.coordinator_latency --layers 1 --steps 3",
    "benchmarks.server.agent --turns 2",
    "benchmarks.server.fairness --layers 1 --tokens 64",
    "benchmarks.server.restart --layers 1 --tokens 64",
)

TOO_TINY = (
    pytest.param("benchmarks.policy.host_costs --limit 4", "raise --limit"),
    pytest.param(
        "benchmarks.runtime.coordinator_latency --layers 1 --steps 0",
        "raise --steps",
        marks=pytest.mark.slow,
    ),
)


@pytest.mark.parametrize(("command", "advice"), TOO_TINY)
def test_a_benchmark_of_too_little_says_what_to_raise(
    command: str, advice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *flags = command.split()
    monkeypatch.setattr(sys, "argv", [name, *flags])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    assert ended.value.code == 2
    assert advice in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_benchmark_ends_with_what_its_rows_show(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *flags = command.split()
    monkeypatch.setattr(sys, "argv", [name, *flags])
    assert not importlib.import_module(name).main()
    output = last_object(capsys.readouterr().out)
    rows = [row for row in ROWS if f" {name}" in row.command]
    assert rows
    for row in rows:
        if row.template:
            assert row.filled(output)
