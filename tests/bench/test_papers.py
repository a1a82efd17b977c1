"""Tests of the papers' tables: each comes from a small trace and is in docs/papers.md."""

import dataclasses
import json

import numpy as np
import pytest
from benchmarks.papers import collaborative, predictions
from benchmarks.papers.__main__ import NAMES, PAGE, TABLES, main
from benchmarks.papers.replays import Replays, pieces, with_perfect_hints
from benchmarks.papers.table import NONE, Table, marks, placed

from tandem.policy.plan import LayerLoad
from tandem.policy.prediction.policy import Forecast
from tandem.sim.steps import LoadReader, Step
from tandem.trace import RoutingTrace, read_trace
from tests.conftest import REPOSITORY

TRACES = REPOSITORY / "data" / "traces"
WITHOUT_MODEL = sorted(set(TABLES) - {"look-ahead", "memory"})


@pytest.fixture(scope="module")
def trace() -> RoutingTrace:
    """Return a trace of four layers and a few tokens."""
    whole = read_trace(TRACES / "gpt-oss-20b.npz").sequences(0, 5)
    assert whole.weights is not None
    return dataclasses.replace(
        whole,
        meta=dataclasses.replace(whole.meta, n_moe_layers=4),
        experts=whole.experts[:, :4],
        weights=whole.weights[:, :4],
    )


@pytest.fixture(scope="module")
def replays(trace: RoutingTrace) -> Replays:
    return Replays({"gpt-oss-20b": trace}, prompt=8, generated=8, tokens=64, most=4)


@pytest.mark.parametrize("name", WITHOUT_MODEL)
def test_every_table_has_its_cells(name: str, replays: Replays) -> None:
    table = TABLES[name](replays)
    assert {len(row) for row in table.rows} == {len(table.head)}
    own = [row for row in table.rows if "here" in row[0] + row[1]] or table.rows
    assert all(set(row[1:]) != {NONE} for row in own)


def test_every_table_has_its_place_in_the_document() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in TABLES:
        assert all(text.count(f"{mark}\n") == 1 for mark in marks(name)), name
    assert text.count("<!-- ") == 2 * len(TABLES)


def test_a_table_is_written_between_its_marks() -> None:
    first, last = marks("x")
    table = Table(["a", "b"], [["1", "2"]])
    text = placed(f"before\n{first}\nold\n{last}\nafter\n", "x", table)
    assert text == f"before\n{first}\n| a | b |\n| --- | --- |\n| 1 | 2 |\n{last}\nafter\n"
    assert placed(text, "x", table) == text
    with pytest.raises(ValueError, match="no lines"):
        placed("before", "x", table)


def test_the_command_prints_tables_and_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reading", "--json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert set(found) == {"reading"}
    for row in found["reading"]["rows"]:
        assert "| " + " | ".join(row) + " |" in out
    with pytest.raises(SystemExit):
        main(["readings"])


def test_table_one_fits_paper_2_only_as_a_layers_two_experts(replays: Replays) -> None:
    rows = {row[0]: row[1:] for row in collaborative.reading(replays).rows}
    assert rows["Mixtral, every expert copied"] == ["1.1", "0.56", "1.12"]
    stated, one, two = rows["Mixtral, 24 threads"]
    assert float(one.split(" .. ")[1]) < float(stated)
    least, most = map(float, two.split(" .. "))
    assert least < float(stated) < most


def test_the_testbed_of_paper_2_is_scaled_by_its_table() -> None:
    few, all_threads = collaborative.machine(1), collaborative.machine(24)
    shape, known = all_threads.shape("mixtral-8x7b"), few.shape("mixtral-8x7b")
    assert shape.link_seconds_per_expert == pytest.approx(0.014, rel=0.01)
    assert known.cpu_seconds[0] / shape.cpu_seconds[0] == pytest.approx(44.1 / 7.3)


def test_pieces_are_of_one_length_and_of_one_sequence(trace: RoutingTrace) -> None:
    cut = pieces(trace, 100)
    assert set(np.diff(cut.seq_offsets)) == {100}
    lengths = np.diff(trace.seq_offsets)
    assert cut.num_sequences == sum(lengths // 100)
    first = 100 * (lengths[0] // 100)
    assert np.array_equal(cut.experts[:first], trace.experts[:first])


def test_perfect_hints_are_what_the_routers_choose(trace: RoutingTrace) -> None:
    hinted, step = with_perfect_hints(trace), Step(np.arange(3), False, 3)
    reader = LoadReader(hinted)
    for load, hints in zip(reader.loads(step), reader.hints(step), strict=True):
        assert [hint.source for hint in hints] == ["residual"]
        assert hints[0].load.experts == load.experts
        assert hints[0].load.tokens == load.tokens


def test_an_expert_with_as_many_tokens_as_the_kth_is_right() -> None:
    load = LayerLoad(0, (1, 2, 3), (5, 2, 2))
    assert predictions.num_right(Forecast([0.0, 0.1, 0.9, 0.0], 0.0, 1.0), load, 1) == 0
    assert predictions.num_right(Forecast([0.0, 0.9, 0.0, 0.8], 0.0, 1.0), load, 2) == 2


def test_a_cache_of_random_experts_hits_as_counted() -> None:
    one, both = collaborative.random_hits(8, 4)
    assert one == pytest.approx(1 - 4 / 8 * 3 / 7)
    assert one + both == pytest.approx(1.0)  # half of the experts


def test_what_calibrate_finds_becomes_tables_5_and_8() -> None:
    found = {
        "batches": [1, 8, 16],
        "accuracy": {"gate": [0.5, 0.6, 0.7], "residual": [0.6, 0.7, 0.8]},
        "cosine": {"gate": 0.85, "residual": 0.9},
    }
    rows = predictions.look_ahead_of(found).rows
    assert rows[-2:] == [
        ["here, demo model, batch 8", "60.0", "70.0", ".85", ".90"],
        ["here, demo model, batch 16", "70.0", "80.0", ".85", ".90"],
    ]


def test_the_shipped_traces_have_the_names_that_are_replayed() -> None:
    assert all((TRACES / f"{name}.npz").is_file() for name in NAMES)
