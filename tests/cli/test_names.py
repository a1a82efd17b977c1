"""Tests of names of formats and policies: any case is accepted; errors suggest a name."""

import pytest
import torch

from tandem.cli.main import main
from tandem.core.errors import ConfigError
from tandem.hf.config import OffloadConfig, parse_dense_dtype, parse_dtype, parse_expert_dtype
from tandem.kernels.attention import require_kv_dtype
from tandem.kernels.formats.weight_format import FORMATS, find_format


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_every_format_is_known_in_upper_case(fmt: object) -> None:
    name = getattr(fmt, "name").upper()  # noqa: B009
    assert find_format(name) == parse_dense_dtype(name) == fmt


def test_options_keep_names_in_lower_case() -> None:
    config = OffloadConfig(expert_dtype="INT4", dense_dtype="Auto")
    assert (config.expert_dtype, config.dense_dtype) == ("int4", "auto")
    assert parse_expert_dtype("BF16") == parse_dtype("BFloat16", field="dtype") == torch.bfloat16
    assert parse_expert_dtype(torch.float16) == torch.float16
    assert parse_dense_dtype("NONE") is None
    assert require_kv_dtype("INT8") == "int8"


@pytest.mark.parametrize("parse", [parse_expert_dtype, parse_dense_dtype, find_format])
def test_a_mistyped_name_in_upper_case_gets_the_nearest(parse: object) -> None:
    with pytest.raises(ConfigError, match=r"(?i)'mxpf4'.*did you mean 'mxfp4'"):
        parse("MXPF4")  # type: ignore[operator]


def test_choices_of_flags_are_taken_in_any_case(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "/no/model", "-p", "x", "--device", "EMULATED", "--eviction", "LRU"]
    assert main(words) == 2
    assert "/no/model is not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "chat", "serve"])
def test_help_shows_what_people_use_and_help_all_the_rest(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    shown = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            main([command, flag])
        assert ended.value.code == 0
        shown.append(capsys.readouterr().out)
    short, whole = shown
    assert "--device" in short
    assert "--help-all shows" in short
    for flag in ("--prefetch-count", "--keep-limit", "--pool"):
        assert flag not in short
        assert f"\n  {flag} " in whole
    assert len(short.splitlines()) < len(whole.splitlines()) - 30
