"""Tests of the files that MODEL names: revisions of a hub id, and code beside a model."""

import json
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import dynamic_module_utils

import tandem
from tandem.cli.main import main
from tandem.cli.parser import COMMANDS
from tests.hf.tiny import save_tiny_checkpoint

COMMIT = "a" * 40
WITHOUT_A_MODEL = {"completion", "datapoint", "models", "simulate"}
CODE = """
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

merges = get_checkpoint_conversion_mapping("qwen3_moe")
register_checkpoint_conversion_mapping("theirs", merges, overwrite=True)

class TheirConfig(Qwen3MoeConfig):
    model_type = "theirs"

class TheirModel(Qwen3MoeForCausalLM):
    config_class = TheirConfig
"""


@pytest.fixture
def with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with a type that only the code beside it defines; it uses the experts interface."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    directory = save_tiny_checkpoint(tmp_path / "theirs", "qwen3_moe")
    (directory / "theirs.py").write_text(CODE)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config |= {
        "model_type": "theirs",
        "architectures": ["TheirModel"],
        "auto_map": {
            "AutoConfig": "theirs.TheirConfig",
            "AutoModelForCausalLM": "theirs.TheirModel",
        },
    }
    file.write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - WITHOUT_A_MODEL))
def test_every_command_with_a_model_has_the_flags(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert "--revision REVISION" in shown
    assert "--trust-remote-code" in shown


def test_a_revision_of_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    save_tiny_checkpoint(tmp_path / "models--owner--tiny" / "snapshots" / COMMIT)
    words = ["run", "owner/tiny", "-p", "x", "--max-new-tokens", "4", "--quiet"]
    assert main([*words, "--revision", COMMIT]) == 0
    capsys.readouterr()
    assert main([*words, "--revision", "b" * 40]) == 2
    assert "owner/tiny is not on this machine" in capsys.readouterr().err


def test_a_directory_has_no_revisions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path), "--revision", "main"]) == 2
    assert "revision is 'main', and" in capsys.readouterr().err


def test_code_of_a_model_runs_only_on_request(
    with_code: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "packed"
    words = ["--expert-dtype", "int8"]
    assert main(["pack", str(with_code), "-o", str(packed), *words]) == 2
    assert "--trust-remote-code" in capsys.readouterr().err
    assert not packed.exists()
    words.append("--trust-remote-code")
    assert main(["plan", str(with_code), "--no-measure", *words]) == 0
    assert main(["pack", str(with_code), "-o", str(packed), *words, "--quiet"]) == 0
    for directory in (with_code, packed):
        run = ["run", str(directory), "-p", "hello", "--max-new-tokens", "4", "--temperature", "0"]
        assert main([*run, *words, "--quiet"]) == 0
        assert main(["doctor", str(directory), *words, "--threads", "1"]) == 0
    model = tandem.load(packed, trust_remote_code=True)
    assert type(model).__name__ == "TheirModel"
