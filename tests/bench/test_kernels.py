"""Tests that Tandem's kernels and other systems' can be timed in turn; speed is not checked."""

import json
import time
from pathlib import Path

import pytest
from benchmarks.kernels.peers import PEERS
from benchmarks.kernels.peers.__main__ import start_peers
from benchmarks.kernels.peers.process import PeerProcess
from benchmarks.kernels.peers.torch_linear import TorchLinear

from tandem.bench.kernels import KernelBench, Work
from tests.programs import python

SMALL = Work(256, 256, "bf16", num_active=2, num_threads=1, store_bytes=4_000_000, max_tokens=5)


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_runs_or_says_why_not(name: str) -> None:
    reason = PEERS[name].why_missing()
    if reason is not None:
        assert "pip install" in reason or "package" in reason
        return
    assert PEERS[name].supports(SMALL.format)
    peer = PeerProcess(name, SMALL)
    try:
        assert peer.bytes_per_call == 2 * 3 * 256 * 256 * 2
        for tokens in (1, 5):
            seconds = peer.time_calls(tokens, 3)
            assert len(seconds) == 3
            assert min(seconds) > 0
    finally:
        peer.close()


def test_a_peer_stands_still_between_its_turns() -> None:
    peer = PeerProcess("torch", SMALL)
    try:
        for _ in range(2):
            assert _state(peer) == "T"  # stopped
            peer.time_calls(1, 1)
    finally:
        peer.close()
    assert not Path(f"/proc/{peer.pid}").exists()


def _state(peer: PeerProcess) -> str:
    for _ in range(1000):  # the signal takes effect when the process is next scheduled
        status = Path(f"/proc/{peer.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if status == "T":
            break
        time.sleep(0.001)
    return status


@pytest.mark.slow
def test_a_peer_that_fails_is_named_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in set(PEERS) - {"torch"}:
        monkeypatch.delitem(PEERS, name)
    monkeypatch.setitem(PEERS, "nobody", TorchLinear())  # an unknown name in its process
    bench = KernelBench(num_threads=1, store_bytes=1_000_000)
    with start_peers(bench.work("olmoe", "bf16", [1]), bench.failures) as peers:
        cases = list(bench.cases("olmoe", "bf16", [1], peers))
    assert [case.peer for case in cases] == [None, "torch"]
    assert cases[1].ratio == pytest.approx(cases[1].microseconds / cases[0].microseconds)
    assert list(bench.failures) == ["nobody, bf16"]
    assert "nobody" in bench.failures["nobody, bf16"]


def test_peers_are_timed_beside_each_case_or_named_as_missing() -> None:
    words = ["--shape", "olmoe", "--format", "bf16", "--tokens", "1", "--threads", "1", "--json"]
    command = "import runpy; runpy.run_module('benchmarks.kernels.peers', run_name='__main__')"
    done = python(command, *words)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    own, *others = report["cases"]
    assert own["peer"] is None
    timed = {case["peer"] for case in others}
    assert "torch" in timed
    assert timed | set(report["missing_peers"]) == {
        *("torch", "llama.cpp", "kt-kernel", "kt-kernel, 1 thread fewer")
    }
    for case in others:
        assert case["ratio"] == pytest.approx(case["microseconds"] / own["microseconds"])


def test_every_case_reads_other_experts_than_the_one_before() -> None:
    work = Work(64, 32, "int4-g32", num_active=8, num_threads=1, store_bytes=1, max_tokens=1)
    assert work.num_experts(4.5) == 16  # at least two calls' experts, however small the store
    assert work.num_experts(4.5) % work.num_active == 0
