"""Requests made from the API's own description; `python -m tests.server.abuse` sends a thousand."""

from pathlib import Path

import pytest

from tests.server.abuse import COMMAND, FLAGS, send
from tests.server.malformed import send_all
from tests.server.running import running_server


@pytest.mark.skipif(not COMMAND.exists(), reason="schemathesis is not installed")
def test_no_request_is_answered_otherwise_than_described(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    with running_server(tiny_checkpoint, *FLAGS, cache=tmp_path) as server:
        done = send(server, phases="fuzzing", examples=8)
        assert done.returncode == 0, done.stdout
        number, problems = send_all(server)
        assert number > 250
        assert problems == []
        assert "Traceback" not in server.log
