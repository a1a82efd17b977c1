"""Tests of the Ray Serve application: options, and two replicas if Ray is installed."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tandem.cli.replicas import application
from tandem.core.errors import ConfigError


@pytest.mark.skipif(
    find_spec("ray") is None, reason='Ray is not installed: pip install "tandem-moe[ray]"'
)
@pytest.mark.demo
@pytest.mark.slow
def test_two_replicas_of_the_demo_answer_at_one_address() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.server.local_ray", "demo"],
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["replicas"] == {"RUNNING": 2}
    assert found["are_equal"]
    assert 0 < found["answered_by_one"] < found["answered"], "both replicas must have answered"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"checkpoint": "demo"}, "unknown option 'checkpoint'"),
        ({"replicas": "two"}, "replicas is 'two'"),
        ({"port": "8001"}, "port=8001 is ignored by replicas"),
        ({"key_running": "2"}, "key-running tells clients apart"),
    ],
)
def test_bad_options_are_named(arguments: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        application(arguments)
