"""Tests of profiles: round trip, interpolation, and one sentence for every error."""

import json
import re
from typing import Any

import pytest

from tandem.core.errors import ConfigError, FileFormatError
from tandem.hardware.profiles import load_profile, profile_names, save_profile
from tandem.policy.cost import CostTable, HardwareProfile, interpolate
from tests.policy.strategies import shape_costs

GRAPH = {
    "path": "graph", "step_seconds": 0.3, "layer_seconds": 0.25, "cpu_begin_seconds": 0.5,
    "cpu_end_seconds": 0.125, "fetch_seconds": 3.0,
}  # fmt: skip


def text(**changes: Any) -> str:
    values = json.loads(load_profile("laptop-8gb").to_json())
    for key, value in changes.items():
        if key in values:
            values[key] = value
        else:
            values["shapes"][0][key] = value
    return json.dumps(values)


@pytest.mark.parametrize("name", profile_names())
def test_profiles_round_trip(name: str, tmp_path: Any) -> None:
    profile = load_profile(name)
    save_profile(profile, tmp_path / "copy.json")
    assert load_profile(str(tmp_path / "copy.json")) == profile
    assert profile.source


DISK = {
    "reads": "direct", "piece_bytes": 4096, "depths": [1, 4], "bytes_per_second": [1e9, 2e9],
}  # fmt: skip


def test_a_disk_is_read_back_and_may_be_missing() -> None:
    values = json.loads(load_profile("laptop-8gb").to_json())
    profile = HardwareProfile.from_json(json.dumps(values | {"disk": DISK}), where="there")
    assert profile.disk is not None
    assert profile.disk.most_bytes_per_second == 2e9
    assert HardwareProfile.from_json(profile.to_json(), where="again") == profile
    del values["disk"]  # as Tandem wrote it before
    assert HardwareProfile.from_json(json.dumps(values), where="older").disk is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reads": "fast"}, "there: disk: reads is 'fast'; expected direct or buffered"),
        ({"piece_bytes": 0}, "piece_bytes is 0"),
        ({"depths": [1]}, "bytes_per_second has 2 entries for 1 depths"),
        ({"depths": [1, 0]}, "depths is 0"),
        ({"depths": 1}, "depths is 1; expected a list"),
        ({"bytes_per_second": [1e9, 0]}, "bytes_per_second is 0; expected rates above 0"),
        ({"speed": 1}, "there: disk: unknown key 'speed'"),
    ],
)
def test_what_is_wrong_with_a_disk_is_reported(changes: dict[str, Any], message: str) -> None:
    values = json.loads(load_profile("laptop-8gb").to_json()) | {"disk": DISK | changes}
    with pytest.raises(FileFormatError, match=re.escape(message)):
        HardwareProfile.from_json(json.dumps(values), where="there")


def test_every_machine_knows_every_shape() -> None:
    shapes = {tuple(costs.shape for costs in load_profile(n).shapes) for n in profile_names()}
    assert shapes == {("deepseek-v2-lite", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b")}


def test_paper_2_table_1_is_in_its_profile() -> None:
    mixtral = load_profile("collab-testbed").shape("mixtral-8x7b")
    assert mixtral.cpu_seconds[0] == pytest.approx(7.3e-3, rel=0.01)
    assert mixtral.link_seconds_per_expert == pytest.approx(28.0e-3, rel=0.01)
    assert mixtral.gpu_seconds[0] == pytest.approx(0.3e-3, rel=0.25)


def test_tables_are_read_between_and_beyond_their_entries() -> None:
    assert [interpolate((1, 3), (1.0, 2.0), n) for n in (0, 1, 2, 3, 5)] == [0, 1, 1.5, 2, 3]
    table = CostTable(shape_costs(cpu=(1.0, 3.0)))
    table.require(100)
    assert table.cpu[:4] == [0.0, 1.0, 3.0, 5.0]
    assert len(table.cpu) > 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"cpu_first_expert_seconds": -1},
            r"shapes\[0\]: cpu_first_expert_seconds is -1; expected",
        ),
        ({"cpu_seconds": [-1.0]}, r"shapes\[0\]: cpu_seconds has 1 entries; expected 13"),
        ({"gpu_seconds": [-1.0] * 13}, r"gpu_seconds\[0\] is -1.0; expected a time of at least 0"),
        ({"gpu_seconds": ["fast"] * 13}, r"gpu_seconds\[0\] is 'fast'; expected a time"),
        ({"tokens": [2, 1]}, r"tokens is \[2, 1\]; expected growing counts that start at 1"),
        ({"tokens": 7}, "tokens is 7; expected a list"),
        ({"top_k": 1000}, "top_k is 1000; expected at most 64"),
        ({"link_bytes_per_second": 0}, "link_bytes_per_second is 0; expected more than 0"),
        ({"cpu_slowdown_while_copying": 0.5}, "is 0.5; expected a factor of at least 1"),
        ({"cpu_threads": "8"}, "cpu_threads is '8'; expected an integer of at least 1"),
        ({"shapes": []}, "shapes is empty; expected the costs of at least one model shape"),
        ({"shapes": 3}, "shapes is 3; expected a list of objects"),
        ({"cpu_secondz": []}, r"unknown key 'cpu_secondz'; did you mean 'cpu_seconds'"),
        ({"format": 2}, "format is 2; expected 1"),
        ({"dense_seconds": [1e308] * 13}, "expected a time of at least 0 seconds and at most 1e6"),
        ({"shape": 5}, "shape is 5; expected a text"),
        ({"name": "\x1b[2J"}, "expected a text without control characters"),
        ({"gpu_memory_bytes": 10**400}, "gpu_memory_bytes is 10+; expected an integer"),
        ({"host": 3}, "machine.json: host is 3; expected a list of objects"),
        ({"host": [{"path": "graph"}]}, r"host\[0\]: step_seconds is missing"),
        ({"host": [GRAPH | {"layer_seconds": -1}]}, r"host\[0\]: layer_seconds is -1; expected"),
        ({"host": [GRAPH | {"path": ""}]}, r"host\[0\]: path is ''; expected the name"),
    ],
)
def test_a_wrong_profile_is_named_in_one_sentence(changes: Any, message: str) -> None:
    with pytest.raises(FileFormatError, match=message) as error:
        HardwareProfile.from_json(text(**changes), where="machine.json")
    assert str(error.value).startswith("machine.json: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "machine.json: not JSON"),
        ("[]", "machine.json: found a JSON list; expected an object"),
        ("[" * 100_000, "machine.json: not JSON"),
        ('{"shapes": [3]}', r"shapes\[0\]: found 3; expected an object"),
        ('{"shapes": [{}]}', r"shapes\[0\]: shape is missing"),
        ('{"shapes": []}', "machine.json: name is missing"),
    ],
)
def test_other_files_are_refused(content: str, message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        HardwareProfile.from_json(content, where="machine.json")


def test_unknown_names_are_refused_with_near_ones() -> None:
    with pytest.raises(ConfigError, match="unknown hardware 'laptop'; did you mean 'laptop-8gb'"):
        load_profile("laptop")
    with pytest.raises(ConfigError, match="found no such file; expected a hardware profile"):
        load_profile("./nowhere.json")
    with pytest.raises(ConfigError, match="no costs for the shape 'mixtral'; did you mean"):
        load_profile("laptop-8gb").shape("mixtral")


def test_the_hosts_work_is_charged_where_it_is_waited_for() -> None:
    values = json.loads(text(host=[GRAPH]))
    profile = HardwareProfile.from_json(json.dumps(values), where="machine.json")
    alone = shape_costs(dense=(0.5, 1.0), first=0.25, link=2.0)
    charged = profile.charged(alone)
    assert charged.dense_seconds == (0.5 + 0.25 + 0.1, 1.0 + 0.25 + 0.1)  # of three layers
    assert charged.cpu_first_expert_seconds == 0.25 + 0.5 + 0.125
    assert charged.link_seconds_per_expert == 3.0
    assert (charged.cpu_seconds, charged.gpu_seconds) == (alone.cpu_seconds, alone.gpu_seconds)
    assert profile.charged(alone, "graph") == charged
    assert profile.charged(alone, "none") == alone
    assert profile.charged(alone, is_resident=True).dense_seconds == (0.5 + 0.1, 1.0 + 0.1)
    with pytest.raises(ConfigError, match="no host costs for 'graf'; did you mean 'graph'"):
        profile.charged(alone, "graf")


def test_prompts_pay_what_the_cpu_costs_planned_steps() -> None:
    segments = {**GRAPH, "path": "segments", "cpu_begin_seconds": 4.0, "cpu_end_seconds": 2.0}
    values = json.loads(text(host=[GRAPH, segments]))
    profile = HardwareProfile.from_json(json.dumps(values), where="machine.json")
    costs = CostTable(profile.charged(shape_costs(first=0.25)))
    assert costs.cpu_first == 0.25 + 0.5 + 0.125
    assert costs.planned_first == 0.25 + 4.0 + 2.0
    alone = CostTable(shape_costs(first=0.25))
    assert alone.planned_first == alone.cpu_first == 0.25


def test_a_profile_without_host_costs_charges_none() -> None:
    alone = shape_costs()
    assert load_profile("dali-testbed").charged(alone) == alone
