"""Tests of `tandem simulate` as a command: last line, lists, one sentence per error."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.cli.main import main
from tandem.hardware.profiles import load_profile, save_profile
from tandem.policy.cost import DiskCosts

TRACES = Path(__file__).parents[2] / "data" / "traces"
TRACE = str(TRACES / "gpt-oss-20b.npz")
KEYS = {
    "tokens",
    "steps",
    "hit_rate",
    "belady_hit_rate",
    "lru_hit_rate",
    "prefetch",
    "decode_tokens_per_second",
    "prefill_tokens_per_second",
    "bytes_fetched",
    "busy",
    "plan_microseconds",
    "plan_over_optimal",
}


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(result, dict)
    return result


def test_the_last_line_is_one_json_object(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    dump = tmp_path / "plans.jsonl"
    words = ["simulate", TRACE, "--limit", "40", "--prefetch", "1", "--dump", str(dump), "--json"]
    assert main(words) == 0
    assert last_json(capsys).keys() >= KEYS
    assert len(dump.read_text().splitlines()) > 40 * 24


def test_two_traces_are_reported_each_and_together(capsys: pytest.CaptureFixture[str]) -> None:
    other = str(TRACES / "deepseek-v2-lite.npz")
    assert main(["simulate", TRACE, other, "--limit", "30", "--json"]) == 0
    result = last_json(capsys)
    assert result.keys() >= KEYS
    assert isinstance(result["traces"], dict)
    assert list(result["traces"]) == [TRACE, other]


def test_list_names_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--hardware", "list", "--assignment", "list", "--json"]) == 0
    result = last_json(capsys)
    machines = ["desktop-12gb", "desktop-16gb", "desktop-24gb", "laptop-8gb"]
    assert result["hardware"] == ["collab-testbed", "dali-testbed", "ddr4-12gb", *machines]
    assert isinstance(result["assignment"], list)
    assert {"balanced", "dali", "exact"} <= set(result["assignment"])


def test_the_hosts_work_counts_unless_it_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    speeds: dict[str, Any] = {}
    for path in ("segments", "graph", "none"):
        assert main(["simulate", TRACE, "--limit", "30", "--host-path", path, "--json"]) == 0
        result = last_json(capsys)
        assert result["host_path"] == (None if path == "none" else path)
        speeds[path] = result["decode_tokens_per_second"]
    assert main(["simulate", TRACE, "--limit", "30", "--json"]) == 0
    assert last_json(capsys)["decode_tokens_per_second"] == speeds["segments"]
    assert speeds["segments"] < speeds["graph"] < speeds["none"]


def test_experts_on_a_disk(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profile = load_profile("desktop-12gb")
    disk = DiskCosts(reads="direct", piece_bytes=4096, depths=(1, 4), bytes_per_second=(1e9, 2e9))
    file = tmp_path / "here.json"
    save_profile(dataclasses.replace(profile, disk=disk), file)
    words = ["simulate", TRACE, "--limit", "40", "--json"]
    half = [*words, "--disk", "2GB/s"]
    assert main(half) == 0
    found = last_json(capsys)
    assert main([*words, "--disk", "profile", "--hardware", str(file)]) == 0
    assert last_json(capsys)["decode_tokens_per_second"] == found["decode_tokens_per_second"]
    assert (found["host_experts"], found["slots"]) == (0.5, 16 * 24)
    assert main([*half, "--expert-memory", "8GB"]) == 0
    more = last_json(capsys)
    assert 0.6 < more["host_experts"] < 0.8  # type: ignore[operator]  # of 10.7 GB
    assert more["bytes_read"] < found["bytes_read"]  # type: ignore[operator]


def test_a_gpu_over_memory_over_a_disk(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", TRACE, "--limit", "40", "--gpu-experts", "0.25", "--json"]
    found: list[dict[str, Any]] = []
    for more in ([], ["--disk", "2GB/s", "--host-experts", "0.5", "--host-path", "segments"]):
        assert main([*words, *more]) == 0
        out = capsys.readouterr().out
        assert ("memory has slots for 50% of the experts" in out) == bool(more)
        found.append(json.loads(out.splitlines()[-1]))
    memory, disk = found
    assert (memory["host_experts"], memory["bytes_read"]) == (1.0, 0)
    assert (disk["host_experts"], disk["bytes_read"] > 1e9) == (0.5, True)
    assert disk["decode_tokens_per_second"] < memory["decode_tokens_per_second"]


def test_compare_prints_a_table_and_draws(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "c.svg"
    words = ["simulate", TRACE, "--compare", "--limit", "20", "--picture", str(picture), "--json"]
    assert main(words) == 0
    assert "systems" in last_json(capsys)
    assert picture.read_text().startswith("<svg ")


def test_a_limit_without_any_decode_step_is_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["simulate", TRACE, "--limit", "10", "--json"]
    assert main(words) == 0
    out = capsys.readouterr().out.splitlines()
    assert "no decode step within the limit" in "".join(out)
    assert json.loads(out[-1])["decode_tokens_per_second"] is None
    picture = tmp_path / "c.svg"
    assert main([*words, "--compare", "--limit", "20", "--picture", str(picture)]) == 0
    captured = capsys.readouterr()
    assert "batch 8, 32: a limit of 20 tokens ends within the prompts" in captured.err
    tandem = next(line for line in captured.out.splitlines() if line.startswith("| tandem |"))
    cells = [cell.strip() for cell in tandem.strip("|").split("|")][1:]
    assert [cell == "-" for cell in cells] == [False, True, True, False, False]
    assert "0.0" not in cells
    systems = json.loads(captured.out.splitlines()[-1])["systems"]
    speeds = {entry["batch"]: entry["decode_tokens_per_second"] for entry in systems}
    assert speeds[32] is None
    assert speeds[1] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no trace given; expected at least one routing trace"),
        (["nowhere.npz"], "nowhere.npz: found no such file; expected a routing trace"),
        ([TRACE, "--gpu-experts", "1.5"], "gpu_experts is 1.5; expected a fraction in 0..1"),
        ([TRACE, "--batch", "0"], "batch is 0; expected a number >= 1"),
        ([TRACE, "--assignment", "dally"], "unknown assignment 'dally'; did you mean 'dali'?"),
        ([TRACE, "--eviction", "lruu"], "unknown eviction 'lruu'; did you mean 'lru'?"),
        ([TRACE, "--prediction", "magic"], "unknown prediction 'magic'"),
        ([TRACE, "--prefetch", "-1"], "prefetch_count is -1; expected at least 0"),
        ([TRACE, "--host-path", "graf"], "no host costs for 'graf'; did you mean 'graph'?"),
        ([TRACE, "--hardware", "desktop"], "unknown hardware 'desktop'; did you mean"),
        ([TRACE, "--shape", "mixtral"], "no costs for the shape 'mixtral'; did you mean"),
        ([TRACE, "--compare", "--disk", "2GB/s", "--gpu-experts", "0.5"], "leave --disk out"),
        ([TRACE, TRACE, "--compare"], "--compare got 2 traces; expected one"),
        ([TRACE, "--picture", "c.svg"], "--picture draws what --compare finds; give --compare too"),
        (["/"], "/: found a folder; expected a routing trace"),
        ([TRACE, "--disk", "fast"], "disk is 'fast'; expected a rate such as 16GB/s"),
        ([TRACE, "--disk", "profile"], "desktop-12gb has none; give a rate"),
        ([TRACE, "--disk", "2GB/s", "--prefetch", "2"], "--prefetch: with --disk the CPU"),
        ([TRACE, "--disk", "2GB/s", "--expert-memory", "1MB"], "and need at least"),
        (
            [TRACE, "--disk", "2GB/s", "--host-experts", "2"],
            "--host-experts is 2.0; expected 0 to 1",
        ),
        ([TRACE, "--host-experts", "0.4"], "--host-experts sets the memory over a disk"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["simulate", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_broken_trace_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with np.load(TRACE) as good:
        arrays = {name: good[name] for name in good.files}
    arrays["experts"] = arrays["experts"].copy()
    arrays["experts"][5, 1, 2] = 200
    np.savez_compressed(tmp_path / "bad.npz", **arrays)
    assert main(["simulate", str(tmp_path / "bad.npz")]) == 2
    assert "experts[5, 1, 2] is 200; expected ids of 0..31" in capsys.readouterr().err


def test_it_speaks_to_users_and_with_verbose_to_authors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["simulate", TRACE, "--limit", "40"]
    assert main(words) == 0
    plain = capsys.readouterr().out
    assert "the GPU's memory has " in plain
    for word in ("Belady", "equations", "a plan takes"):
        assert word not in plain
    assert main([*words, "--verbose"]) == 0
    whole = capsys.readouterr().out
    for word in ("Belady", "equations", "a plan takes"):
        assert word in whole
