"""Tests of `tandem doctor`: every line has a state, and wrong kernels are detected."""

import json
import re
import shutil
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

import tandem
from tandem.cli.main import main
from tandem.core.errors import TandemWarning
from tandem.experts.execution.reference_executor import ReferenceExecutor
from tandem.forecast import disk_check, machine_check
from tandem.forecast.self_check import check_model
from tandem.forecast.windows_check import Finding
from tandem.hf import compat
from tandem.hf.checkpoint import open_checkpoint
from tandem.hf.config import OffloadConfig
from tandem.policy.cost import DiskCosts
from tests.hf.tiny import save_tiny_checkpoint
from tests.loading.checkpoints import FORMATS, lose_tensors, write_plain, write_quantised

NAMES = {
    *("processor", "cores", "memory", "bandwidth", "huge pages", "GPU", "native build", "torch"),
    *("transformers", "disk", "cache"),
}


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, str]]:
    assert main(["doctor", *words, "--threads", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    return {finding["what"]: finding for finding in report["findings"]}


def test_every_line_has_a_state_and_bad_ones_a_remedy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    findings = doctor(capsys)
    assert set(findings) >= NAMES
    for finding in findings.values():
        assert finding["state"] in ("good", "slow", "broken")
        assert bool(finding["remedy"]) == (finding["state"] != "good"), finding


def test_a_model_is_checked(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    findings = doctor(capsys, str(checkpoint), "--expert-dtype", "int8")
    assert "top-1" in findings["kernels"]["found"]
    assert "3 whole files" in findings["files"]["found"]


def test_checksums_of_a_packed_model(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tandem.pack(checkpoint, tmp_path / "packed", expert_dtype="int8").directory
    assert "have their checksums" in doctor(capsys, str(packed))["files"]["found"]
    file = packed / "tandem-dense.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["doctor", str(packed)]) == 1
    shown = capsys.readouterr()
    assert "\nFAIL model " in shown.out
    assert "tandem-dense.safetensors has the SHA-256" in shown.out


def test_the_disk_under_packed_models_is_measured(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk_check, "_SECONDS", 0.01)
    packed = tandem.pack(checkpoint, tmp_path / "packed", expert_dtype="int8").directory
    found = doctor(capsys, str(packed))["model's disk"]
    assert "GB/s in reads of" in found["found"]
    assert "1 / 4 / 16 at once" in found["found"]
    assert "model's disk" not in doctor(capsys, str(checkpoint))
    in_silence = Path("/dev/shm")
    if in_silence.is_dir():
        with TemporaryDirectory(dir=in_silence) as folder:
            moved = shutil.copytree(packed, Path(folder) / "packed")
            found = doctor(capsys, str(moved))["model's disk"]
        assert found["state"] == "slow"
        assert (
            "accepts O_DIRECT but buffers anyway" in found["found"] or "refuses" in (found["found"])
        )
        assert "memory that slots could use" in found["remedy"]


@pytest.mark.parametrize(
    ("reads", "rate", "state", "message"),
    [
        ("direct", 2e9, "good", "past the page cache"),
        ("direct", 1e8, "slow", "0.10 GB/s"),
        ("refused", 2e9, "slow", "refuses O_DIRECT"),
        ("silently buffered", 2e9, "slow", "buffers anyway"),
    ],
)
def test_what_a_disk_gives_is_judged(reads: Any, rate: float, state: str, message: str) -> None:
    costs = DiskCosts(reads="direct", piece_bytes=4096, depths=(1,), bytes_per_second=(rate,))
    found = disk_check.disk_finding(costs, [Path("/models/file")], reads)
    assert found.state == state
    assert message in found.found
    assert bool(found.remedy) == (state == "slow")


def test_without_a_model_the_disk_of_kept_copies_is_measured(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(disk_check, "_SECONDS", 0.01)
    assert "model's disk" not in doctor(capsys)
    words = ["-p", "hi", "--max-new-tokens", "1", "--expert-dtype", "int8", "--keep", "-q"]
    assert main(["run", str(checkpoint), *words]) == 0
    capsys.readouterr()
    assert "GB/s" in doctor(capsys)["model's disk"]["found"]


def test_a_lost_expert_of_any_layer_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = save_tiny_checkpoint(tmp_path / "tiny", "qwen3_moe")
    lose_tensors(directory, "model.layers.3.mlp.experts.7")
    assert main(["doctor", str(directory), "--threads", "1"]) == 1
    assert "has 7 of the 8 tensors" in capsys.readouterr().out


def test_a_setting_that_the_processor_has_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_ISA", "avx1024")
    assert main(["doctor"]) == 1
    assert "FAIL processor" in capsys.readouterr().out


@pytest.mark.parametrize("options", [{"expert_dtype": "int4"}, {"expert_dtype": "bf16"}])
def test_kernels_agree_with_the_reference(checkpoint: Path, options: dict[str, Any]) -> None:
    found = check_model(open_checkpoint(checkpoint), OffloadConfig(**options))
    assert found.kl < 0.01
    assert found.top1 > 0.9


def test_kernels_agree_in_activation_order(tmp_path: Path) -> None:
    plain = write_plain(tmp_path / "plain", "qwen3_moe")
    directory = write_quantised(tmp_path / "q", plain, FORMATS["gptq-order"])
    assert check_model(open_checkpoint(directory), OffloadConfig()).is_good


def test_a_wrong_expert_is_found(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ReferenceExecutor.rows

    def of_the_next(self: Any, host: Any, expert: int, *rest: Any) -> Tensor:
        return rows(self, host, (expert + 1) % host.arrivals.num_experts, *rest)

    monkeypatch.setattr(ReferenceExecutor, "rows", of_the_next)
    torch.manual_seed(0)
    offload = OffloadConfig(expert_dtype="int8")
    finding = machine_check.check_model_kernels(open_checkpoint(checkpoint), offload)
    assert isinstance(finding, Finding)
    assert finding.state == "broken"
    assert "TANDEM_ISA" in finding.remedy


def test_what_is_installed_is_tested() -> None:
    assert [compat.untested_version(name) for name in compat.NEWEST_TESTED] == [None, None]


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_loading_and_doctor_say_that_a_version_is_newer(
    name: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "torch" if name == "transformers" else "transformers"
    monkeypatch.setitem(compat.NEWEST_TESTED, name, (2, 1))
    message = rf"^{name} {re.escape(version(name))} is newer than 2\.1, [^\n]* pip install"
    with pytest.warns(TandemWarning, match=message) as warned:
        tandem.load(checkpoint)  # runs all the same
    assert len(warned) == 1
    lines = machine_check.check_machine(tmp_path, num_threads=1, isa="auto")
    found = {one.what: one for one in lines}
    assert found[name].state == "slow"
    assert "newer than 2.1" in found[name].remedy
    assert found[other].state == "good"
