"""Tests of commands with a .gguf file, which contains its tokenizer."""

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from benchmarks.generation.gguf_file import add_tokens
from gguf import GGUFWriter, TokenType
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import tandem
from tandem.cli.main import main
from tandem.core.errors import ModelError
from tandem.hf.dense import packed_layers
from tandem.text.gguf_tokenizer import _require_same, load_gguf_tokenizer
from tests.hf.tiny import CHAT_TEMPLATE
from tests.inside import runtime_in
from tests.loading.gguf_files import WIDE, tiny_model, write_gguf

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
# A space and a line's end as byte-level tokenizers write them, and one pair.
TOKENS = [*SPECIAL, *string.ascii_letters, *string.digits, ":", "\u0120", "\u010a", "he"]
CHAT = [{"role": "user", "content": "hello"}]
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


def report_of(capsys: pytest.CaptureFixture[str], command: str, file: Path, *words: str) -> Any:
    assert main([command, str(file), *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(
        tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_model(), "Q4_0", also=add_tokenizer
    )


def test_run_uses_the_tokenizer_in_the_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("-p", "hello", "--max-new-tokens", "6", "--temperature", "0", "--quiet")
    report = report_of(capsys, "run", file, *words)
    assert report["prompt_tokens"] == PROMPT_TOKENS
    assert report["generated_tokens"] == 6
    assert report["text"]


def test_a_file_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_gguf(tmp_path / "bare.gguf", tiny_model(), "Q4_0")
    assert main(["run", str(file), "-p", "hello", "--quiet"]) == 2
    assert f"{file} has no tokenizer that loads" in capsys.readouterr().err


def test_the_tokenizer_of_another_model_beside_the_file_is_not_taken(
    file: Path, tmp_path: Path
) -> None:
    alone = tmp_path / file.name
    alone.write_bytes(file.read_bytes())
    tokenizer = load_gguf_tokenizer(alone)
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"other": 0}, unk_token="other"))
    other.save(str(tmp_path / "tokenizer.json"))
    assert load_gguf_tokenizer(alone).get_vocab() == tokenizer.get_vocab()
    assert load_gguf_tokenizer(alone).name_or_path == str(alone)


def test_bench_measures_the_file_as_it_is(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(capsys, "bench", file, "--prompt", "8", "--gen", "2", "--threads", "1")
    assert report["shape"] == str(file)
    assert report["not_native"] == []


def test_the_plan_has_the_bytes_that_the_load_takes(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(capsys, "plan", file, "--no-measure", "--dense-dtype", "none")
    model = tandem.load(file)
    parts = report["parts_bytes"]
    assert report["expert_formats"] == ["int4-g32"]
    assert parts.pop("experts") == sum(layer.num_bytes for layer in runtime_in(model).store)
    dense = [*model.parameters(), *model.buffers()]
    assert sum(parts.values()) == sum(tensor.nbytes for tensor in dense)
    assert any("tandem pack" in line for line in report["advice"])


def test_the_plan_of_blocks_without_a_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(tmp_path / "q5.gguf", tiny_model(sizes=WIDE), "TQ2_0")
    assert main(["plan", str(file), "--no-measure"]) == 2
    assert "give an expert_dtype" in capsys.readouterr().err
    assert main(["plan", str(file), "--no-measure", "--expert-dtype", "int8"]) == 0


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file like llama.cpp's Q4_K_M: layers and projections have different block types."""
    return write_gguf(
        tmp_path_factory.mktemp("gguf") / "mixed.gguf",
        tiny_model(sizes=WIDE),
        "Q4_K_M",
        also=add_tokenizer,
    )


def test_a_mixed_file_is_planned_run_and_packed(
    mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "packed"
    plan = report_of(capsys, "plan", mixed, "--no-measure")
    assert plan["expert_formats"] == ["q4_k+q6_k", "q4_k"]
    to_packed = ["pack", str(mixed), "-o", str(packed), "--dense-dtype", "auto", "--quiet"]
    assert main(to_packed) == 0
    words = ("-p", "hello", "--max-new-tokens", "6", "--temperature", "0", "--quiet")
    from_blocks, from_packed = (report_of(capsys, "run", m, *words) for m in (mixed, packed))
    assert from_blocks["text"] == from_packed["text"]
    assert from_blocks["generated_tokens"] == 6
    model = AutoModelForCausalLM.from_pretrained(packed)
    formats = {x.packed.matrix.format.name for _, x in packed_layers(model)}
    assert formats == {"q4_k", "q6_k"}


@pytest.mark.parametrize("architecture", ["qwen3moe", "llama", "olmoe", "gpt-oss"])
def test_packed_it_answers_alike(architecture: str, tmp_path: Path) -> None:
    file, packed = tmp_path / "tiny.gguf", tmp_path / "packed"
    write_gguf(file, tiny_model(architecture), "Q8_0", architecture, also=add_tokenizer)
    assert main(["pack", str(file), "-o", str(packed), "--quiet"]) == 0
    models = [tandem.load(file), AutoModelForCausalLM.from_pretrained(packed)]
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        found, expected = (model(input_ids=ids).logits for model in models)
    assert torch.equal(found, expected)
    tokenizers = [load_gguf_tokenizer(file), AutoTokenizer.from_pretrained(packed)]
    texts = [t.apply_chat_template(CHAT, tokenize=False) for t in tokenizers]
    assert texts[0] == texts[1]
    assert tokenizers[0](texts[0])["input_ids"] == tokenizers[1](texts[0])["input_ids"]


def byte_tokens(writer: GGUFWriter) -> None:
    add_tokens(writer, 300)


def smollm(writer: GGUFWriter) -> None:
    add_tokenizer(writer)
    writer.add_tokenizer_pre("smollm")


@pytest.mark.parametrize("add", [byte_tokens, smollm, add_tokenizer])
@pytest.mark.parametrize("architecture", ["qwen3moe", "olmoe", "minimax-m2"])
def test_a_packed_copy_makes_the_tokens_of_the_file(
    add: Callable[[GGUFWriter], None], architecture: str, tmp_path: Path
) -> None:
    file, packed = tmp_path / "tiny.gguf", tmp_path / "packed"
    write_gguf(file, tiny_model(architecture), "Q8_0", architecture, also=add)
    tandem.pack(file, packed)
    own, copy = load_gguf_tokenizer(file), AutoTokenizer.from_pretrained(packed)
    text = "It's 12345  +  67 =\n\n\u00fc \u4f60\u597d <s> hello </s>\ttwo   three"
    ids = own(text)["input_ids"]
    assert len(ids) > 30
    assert copy(text)["input_ids"] == ids
    assert copy.decode(ids) == own.decode(ids)


def test_a_copy_that_transformers_reads_otherwise_is_one_sentence(tmp_path: Path) -> None:
    file, copy = tmp_path / "tiny.gguf", tmp_path / "copy"
    write_gguf(file, tiny_model(), "Q8_0", also=byte_tokens)
    tokenizer = load_gguf_tokenizer(file)
    tokenizer.save_pretrained(copy)
    _require_same(tokenizer, copy, AutoConfig.for_model("qwen3_moe"))
    forced = AutoConfig.for_model("qwen3_5_moe_text")  # its own class, whatever the copy says
    with pytest.raises(ModelError, match=r"Qwen3_5Tokenizer .* other tokens of .*run the file"):
        _require_same(tokenizer, copy, forced)


def test_packing_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "bare.gguf", tiny_model(), "Q4_0")
    tandem.pack(tmp_path / "bare.gguf", tmp_path / "packed")
    assert not (tmp_path / "packed" / "tokenizer.json").exists()


def test_doctor_checks_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", str(file), "--threads", "1", "--json"])
    findings = json.loads(capsys.readouterr().out.splitlines()[-1])["findings"]
    found = {finding["what"]: finding for finding in findings}
    assert found["kernels"]["state"] == "good"
    assert found["files"]["found"].startswith("1 whole GGUF file")


def test_doctor_of_a_damaged_file(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(file.read_bytes()[:-100])
    assert main(["doctor", str(damaged), "--threads", "1"]) == 1
    shown = capsys.readouterr()
    assert "FAIL model " in shown.out
    assert "download it again" in shown.out
    assert shown.err == ""
    assert main(["run", str(damaged), "-p", "x", "--json"]) == 2
    message = json.loads(capsys.readouterr().out)["error"]["message"]
    assert message.startswith(f"{damaged} cannot be read as GGUF")
    assert message.count("download") == 1
    assert main(["doctor", str(tmp_path / "nothing.gguf"), "--threads", "1"]) == 2


def test_a_file_has_no_revisions(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(file), "-p", "x", "--revision", "main"]) == 2
    assert "only a hub id has revisions" in capsys.readouterr().err
