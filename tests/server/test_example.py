"""examples/server_client.py against the running server."""

import json
from pathlib import Path

from tests.server.running import RunningServer
from tests.test_examples import example


def test_client_streams_and_follows_a_schema(server: RunningServer, tmp_path: Path) -> None:
    *streamed, ruled = example("server_client.py", server.address, cache=tmp_path)
    assert streamed
    assert json.loads(ruled)["answer"] in ("yes", "no")
