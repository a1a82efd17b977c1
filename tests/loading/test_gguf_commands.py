"""Commands with a .gguf file: its tokenizer is in it; what cannot read it says so."""

import json
import string
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter, TokenType

import tandem
from tandem.cli.main import main
from tests.hf.tiny import CHAT_TEMPLATE
from tests.loading.test_gguf import tiny_model, write_gguf

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
# A space and a line's end as byte-level tokenizers write them, and one pair.
TOKENS = [*SPECIAL, *string.ascii_letters, *string.digits, ":", "\u0120", "\u010a", "he"]
PROMPT_TOKENS = len("user: hello\nassistant:") - 1  # "he" is one token


def add_tokenizer(writer: GGUFWriter) -> None:
    tokens = TOKENS + [f"<{i}>" for i in range(len(TOKENS), 128)]
    types = [TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (128 - len(SPECIAL))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["h e"])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_chat_template(CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    with torch.no_grad():
        write_gguf(file, tiny_model(), "Q4_0", also=add_tokenizer)
    return file


def test_run_uses_the_tokenizer_in_the_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-p", "hello", "--max-new-tokens", "6", "--temperature", "0", "--quiet", "--json"]
    assert main(["run", str(file), *words]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["prompt_tokens"] == PROMPT_TOKENS
    assert report["generated_tokens"] == 6
    assert report["text"]


def test_a_file_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bare.gguf"
    with torch.no_grad():
        write_gguf(file, tiny_model(), "Q4_0")
    assert main(["run", str(file), "-p", "hello", "--quiet"]) == 2
    assert f"{file} has no tokenizer that loads" in capsys.readouterr().err


def test_the_plan_has_the_bytes_that_the_load_takes(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(file), "--no-measure", "--dense-dtype", "none", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    model = tandem.load(file)
    parts = report["parts_bytes"]
    assert report["expert_formats"] == ["int4-g32"]
    assert parts.pop("experts") == sum(layer.num_bytes for layer in model.hf_quantizer.store)
    dense = [*model.parameters(), *model.buffers()]
    assert sum(parts.values()) == sum(tensor.nbytes for tensor in dense)
    assert not any("tandem pack" in line for line in report["advice"])


def test_the_plan_of_blocks_without_a_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "q5.gguf"
    with torch.no_grad():
        write_gguf(file, tiny_model(), "Q5_1")
    assert main(["plan", str(file), "--no-measure"]) == 2
    assert "give an expert_dtype" in capsys.readouterr().err
    assert main(["plan", str(file), "--no-measure", "--expert-dtype", "int8"]) == 0


def test_pack_and_doctor_refuse_it(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = f"{file} is a GGUF file, which is run, served and planned as it is"
    assert main(["pack", str(file), "-o", str(tmp_path / "packed"), "--quiet"]) == 2
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(["doctor", str(file), "--threads", "1"]) == 2
    assert sentence in capsys.readouterr().err


def test_a_file_has_no_revisions(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(file), "-p", "x", "--revision", "main"]) == 2
    assert "only a hub id has revisions" in capsys.readouterr().err
