"""Tests of several API keys, whose clients must not find each other's data."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.main import main
from tandem.core.errors import ConfigError
from tandem.server.api_keys import ApiKeys, read_keys
from tests.server.running import Reply, RunningServer, running_server

PROMPT = "a beginning that both clients send, word by word. " * 12


def ask(
    server: RunningServer, key: str, path: str, body: Any = None, method: str = "POST"
) -> Reply:
    return server.ask(method, path, body, {"Authorization": f"Bearer {key}"})


def reused(server: RunningServer, key: str, prompt: str = PROMPT) -> int:
    """Return how many tokens of a prompt were reused."""
    reply = ask(server, key, "/v1/completions", {"prompt": prompt, "max_tokens": 1})
    assert reply.status == 200, reply.body
    return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_isolated_clients_find_nothing_of_each_other(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n second\nthird \n")
    flags = (
        "--api-key", "first", "--api-key-file", str(tmp_path / "keys"), "--isolate-keys",
        "--key-running", "2", "--use-log", str(tmp_path / "use.jsonl"),
    )  # fmt: skip
    with running_server(tiny_checkpoint, *flags, "--kv-disk", "50MiB", cache=tmp_path) as server:
        assert [reused(server, "first") > 0 for _ in range(2)] == [False, True]
        assert reused(server, "second") == 0
        assert reused(server, "second") > 0
        for key in ("fourth", "", "first,second"):
            assert ask(server, key, "/v1/models", method="GET").status == 401
        mine = ask(server, "first", "/v1/responses", {"input": "x", "max_output_tokens": 2}).json
        path = f"/v1/responses/{mine['id']}"
        follow = {"input": "y", "previous_response_id": mine["id"], "max_output_tokens": 2}
        for method in ("GET", "DELETE"):
            assert ask(server, "third", path, method=method).status == 404
        refused = ask(server, "third", "/v1/responses", follow)
        assert refused.error["code"] == "previous_response_not_found"
        assert ask(server, "first", "/v1/responses", follow).status == 200
        assert ask(server, "first", path, method="DELETE").status == 200
        many = ask(server, "third", "/v1/completions", {"prompt": "x", "n": 3})
        assert many.status == 400
        assert "may have 2 here" in many.error["message"]
    lines = [json.loads(line) for line in (tmp_path / "use.jsonl").read_text().splitlines()]
    assert (tmp_path / "use.jsonl").stat().st_mode & 0o777 == 0o600
    assert [line["generated_tokens"] for line in lines] == [1, 1, 1, 1, 2, 2]
    assert len({line["key"] for line in lines}) == 2
    assert {line["status"] for line in lines} == {200}
    assert lines[0]["prompt_tokens"] == lines[1]["prompt_tokens"] > 100


@pytest.mark.parametrize("name", [b"authorization", b"x-api-key"])
def test_each_key_is_another_owner(name: bytes) -> None:
    keys = ApiKeys(["first", "second"])
    scheme = b"bearer " if name == b"authorization" else b""
    owners = [keys.owner({name: scheme + key}) for key in (b"first", b"second", b"third", b"")]
    assert owners[2:] == [None, None]
    assert None not in owners[:2]
    assert owners[0] != owners[1]
    assert b"first" not in (owners[0] or b"")
    assert ApiKeys([]).owner({}) == b""


def test_keys_come_from_the_command_line_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("c\n\nd\na\n")
    assert read_keys("a, b", str(file), "e") == ("a", "b", "e", "c", "d")
    assert read_keys(None, None, None) == ()
    file.write_text("\n")
    for listed, path in (("a,,b", None), (None, str(file)), (None, str(tmp_path / "none"))):
        with pytest.raises(ConfigError, match=r"API key"):
            read_keys(listed, path)


@pytest.mark.parametrize(
    "flags", [["--isolate-keys"], ["--key-running", "2"], ["--key-tokens-per-minute", "9"]]
)
def test_flags_for_keys_without_keys_are_refused(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "model", *flags]) == 2
    assert f"{flags[0]} tells clients apart" in capsys.readouterr().err
