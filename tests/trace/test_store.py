"""Tests of traces: round trip, and one sentence for each kind of damage."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.core.errors import FileFormatError
from tandem.trace import RoutingTrace, TraceMeta, read_trace, write_trace

TRACES = Path(__file__).parents[2] / "data" / "traces"


def arrays(**changes: Any) -> dict[str, Any]:
    meta = {"model": "tiny", "n_moe_layers": 2, "n_experts": 4, "top_k": 2, "licence": "none"}
    good: dict[str, Any] = {
        "experts": np.array([[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[3, 1], [0, 2]]], np.uint8),
        "weights": np.full((3, 2, 2), 0.5, np.float16),
        "token_ids": np.array([7, 8, 7], np.int32),
        "seq_offsets": np.array([0, 2, 3], np.int64),
        "meta": np.array(json.dumps(meta | changes.pop("meta", {}))),
    }
    good.update(changes)
    return {name: array for name, array in good.items() if array is not None}


def changed(name: str, place: Any, value: Any) -> Any:
    array = arrays()[name].copy()
    array[place] = value
    return array


def test_a_trace_round_trips(tmp_path: Path) -> None:
    trace = RoutingTrace(
        meta=TraceMeta(
            model="tiny",
            n_moe_layers=2,
            n_experts=4,
            top_k=2,
            predictors=("gate", "residual"),
            by_token=(1,),
            more={"licence": "none"},
        ),
        experts=arrays()["experts"],
        seq_offsets=arrays()["seq_offsets"],
        token_ids=arrays()["token_ids"],
        predicted=np.zeros((3, 2, 2, 1), np.uint8),
    )
    write_trace(tmp_path / "t.npz", trace)
    again = read_trace(tmp_path / "t.npz")
    assert again.meta == trace.meta
    assert again.weights is None
    for name in ("experts", "seq_offsets", "token_ids", "predicted"):
        assert np.array_equal(getattr(again, name), getattr(trace, name))
    assert [p.name for p in tmp_path.iterdir()] == ["t.npz"]


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "gpt-oss-20b"])
def test_the_real_traces_are_whole(name: str) -> None:
    trace = read_trace(TRACES / f"{name}.npz")
    assert trace.num_tokens > 16_000
    assert trace.sequences(1, 3).num_sequences == 2


BAD = [
    (
        {"experts": changed("experts", (1, 0, 1), 9)},
        r"experts\[1, 0, 1\] is 9; expected ids of 0..3",
    ),
    ({"experts": changed("experts", (2, 1, 1), 0)}, r"experts\[2, 1\] names expert 0 twice"),
    ({"experts": arrays()["experts"].astype(float)}, "experts has dtype float64; expected uint8"),
    ({"experts": arrays()["experts"].astype(int)}, "experts has dtype int64; expected uint8"),
    (
        {"experts": arrays()["experts"][:, :1]},
        r"experts has shape \(3, 1, 2\); expected \(3, 2, 2\)",
    ),
    ({"experts": arrays()["experts"].ravel()}, r"experts has shape \(12,\); expected \(12, 2, 2\)"),
    ({"experts": arrays()["experts"][:0]}, "experts has 0 tokens; expected at least 1"),
    ({"experts": None}, "found the arrays .*; expected 'experts' among them"),
    ({"seq_offsets": np.array([0, 3, 2, 3])}, r"seq_offsets\[2\] is 2 after 3; expected growing"),
    ({"seq_offsets": np.array([0, 2])}, "seq_offsets run from 0 to 2; expected 0 to 3"),
    ({"seq_offsets": np.array([0])}, r"seq_offsets has shape \(1,\); expected \(sequences \+ 1,\)"),
    ({"seq_offsets": np.array([0.0, 3.0])}, "seq_offsets has dtype float64; expected int64"),
    ({"weights": changed("weights", (2, 0, 0), np.nan)}, "weights at token 2 are not finite"),
    ({"weights": arrays()["weights"][:2]}, r"weights has shape \(2, 2, 2\); expected \(3, 2, 2\)"),
    ({"weights": arrays()["experts"]}, "weights has dtype uint8; expected float16"),
    ({"token_ids": np.array([1, 2])}, r"token_ids has shape \(2,\); expected \(3,\)"),
    ({"token_ids": np.array(["a", "b", "c"])}, "token_ids has dtype <U1; expected int32"),
    ({"meta": {"top_k": 0}}, "meta.top_k is 0; expected an integer >= 1"),
    ({"meta": {"n_experts": "4"}}, "meta.n_experts is '4'; expected an integer >= 1"),
    ({"meta": {"by_token": [0, 2]}}, r"by_token is \[0, 2\]; expected layers of 0..1, growing"),
    ({"meta": {"by_token": "0"}}, "by_token is '0'; expected layers"),
    ({"meta": {"by_token": [1, 0]}}, "by_token is"),
    ({"meta": {"predictors": "gate"}}, "meta.predictors is 'gate'; expected a list of names"),
    ({"predicted": np.zeros((3, 2, 1, 1), np.uint8)}, "predicted has shape"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_a_wrong_trace_is_named_in_one_sentence(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "bad.npz"
    np.savez_compressed(path, **arrays(**changes))
    with pytest.raises(FileFormatError, match=message) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_ids_out_of_range_in_predictions_are_named(tmp_path: Path) -> None:
    predicted = np.full((3, 2, 1, 1), 4, np.uint8)
    np.savez(tmp_path / "p.npz", **arrays(predicted=predicted, meta={"predictors": ["gate"]}))
    with pytest.raises(
        FileFormatError, match=r"predicted\[0, 0, 0, 0\] is 4; expected ids of 0..3"
    ):
        read_trace(tmp_path / "p.npz")


def test_meta_must_be_json(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", **(arrays() | {"meta": np.array("model")}))
    with pytest.raises(FileFormatError, match="meta is 'model'; expected a JSON object"):
        read_trace(tmp_path / "m.npz")


def test_files_that_are_no_archive_are_refused(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.npz", tmp_path / "bad.npz"
    np.savez_compressed(good, **arrays())
    with pytest.raises(FileFormatError, match="found no such file"):
        read_trace(bad)
    bad.write_bytes(b"")
    with pytest.raises(FileFormatError, match="found an empty file"):
        read_trace(bad)
    bad.write_bytes(good.read_bytes()[:-30])
    with pytest.raises(FileFormatError, match="no whole zip archive"):
        read_trace(bad)
    content = bytearray(good.read_bytes())
    content[60:90] = bytes(30)
    bad.write_bytes(content)
    with pytest.raises(FileFormatError, match="an array that cannot be read"):
        read_trace(bad)


def test_pickled_arrays_are_not_run(tmp_path: Path) -> None:
    np.savez(tmp_path / "o.npz", **(arrays() | {"experts": np.array([{}], dtype=object)}))
    with pytest.raises(FileFormatError, match="an array that cannot be read"):
        read_trace(tmp_path / "o.npz")
