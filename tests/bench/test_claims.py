"""Tests of the comparison with llama.cpp: documented figures, refused measurements."""

from pathlib import Path

import pytest
from benchmarks.generation.claims import CLAIMS, KERNELS, Claim, measured, run, verdict, why_not

from tests.conftest import REPOSITORY

COMPARISON = (REPOSITORY / "docs" / "comparison.md").read_text(encoding="utf-8")
PERFORMANCE = (REPOSITORY / "docs" / "performance.md").read_text(encoding="utf-8")
FOUR = next(claim for claim in CLAIMS if claim.name == "4 layers")
ALL = next(claim for claim in CLAIMS if claim.name == "48 layers")


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_claims_stand_in_the_documents(claim: Claim) -> None:
    assert claim.numbers in PERFORMANCE
    assert len(claim.ratios) == (4 if claim.module == KERNELS else 2)


def test_every_ratio_over_llama_cpp_in_the_comparison_is_a_claim() -> None:
    table = COMPARISON.split("(kt-kernel) |\n")[1].split("\n\n")[0].splitlines()[1:]
    stated = {row.split("|")[3].strip() for row in table}
    assert stated <= {claim.numbers for claim in CLAIMS if claim.is_in_comparison}


def test_claims_that_cannot_be_measured_are_refused_with_a_sentence() -> None:
    assert why_not([FOUR, ALL], 64e9, 64e9, []) is None
    assert "18.5 GB of memory and 16.0 GB are free" in str(why_not([FOUR, ALL], 16e9, 64e9, []))
    assert why_not([FOUR], 16e9, 16e9, []) is None
    assert "set TMPDIR" in str(why_not([ALL], 64e9, 8e9, []))
    assert "pip install" in str(why_not([FOUR], 64e9, 64e9, ["llama-cpp-python"]))
    assert "expected one of 4 layers" in str(why_not([], 64e9, 64e9, []))


def test_ratios_are_read_from_reports() -> None:
    speeds = [
        {"system": "packed", "depth": 0, "ratios": [1.0, 1.0]},
        {"system": "llama.cpp (AVX2, its layouts)", "depth": 0, "ratios": [3.1, 1.1]},
    ]
    found = measured(FOUR, {"speeds": speeds})
    assert found == [3.1, 1.1]
    assert verdict(FOUR, found) == "holds"
    assert verdict(FOUR, [3.1, 0.57]) == "does not hold: 0.50 of it"
    assert verdict(FOUR, []) == "not measured"
    with pytest.raises(OSError, match="no row"):
        measured(FOUR, {"speeds": speeds[:1]})


def test_a_command_is_run_and_its_failure_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = tmp_path / "reports"
    reports.write_text('"a line"\n{"cases": []}\n')
    assert run("json.tool", f"--json-lines --compact {reports}") == {"cases": []}
    assert '"a line"' in capsys.readouterr().err
    with pytest.raises(OSError, match="it ended with"):
        run("json.tool", f"{tmp_path}/missing")
