"""Tests of hostile tokenizers: other file types, rules that multiply text, code, panics."""

from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.model_choice import ModelChoice, load_tokenizer
from tandem.core.errors import ModelError
from tests.hf.tiny import edit_json


def load(checkpoint: Path) -> Any:
    return load_tokenizer(ModelChoice(model=str(checkpoint)))


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, object]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


DOUBLED = [replace("a", "aa")] * 33
CHAINS: list[dict[str, Any]] = [
    {"type": "Sequence", "normalizers": DOUBLED},
    {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": DOUBLED}] * 2},
    replace("a", "b" * 100_000),
    replace("", "b" * 1_000),
    replace("x*", "b" * 1_000, "Regex"),
    {"type": "Prepend", "prepend": "a" * 10_000},
    {"type": "Precompiled", "precompiled_charsmap": b64encode(b"\0" * 4 + b"B" * 3000).decode()},
]


@pytest.mark.parametrize("chain", CHAINS, ids=range(len(CHAINS)))
def test_a_chain_that_multiplies_text(checkpoint: Path, chain: dict[str, Any]) -> None:
    edit_json(checkpoint / "tokenizer.json", normalizer=chain)
    with pytest.raises(ModelError, match=r"normalizer may make a text more than 500 times as long"):
        load(checkpoint)


def test_a_decoder_that_multiplies_text(checkpoint: Path) -> None:
    edit_json(checkpoint / "tokenizer.json", decoder={"type": "Sequence", "decoders": DOUBLED})
    with pytest.raises(ModelError, match="decoder may make a text more than 500 times as long"):
        load(checkpoint)


def test_a_template_that_repeats_the_text(checkpoint: Path) -> None:
    pieces = [{"Sequence": {"id": "A", "type_id": 0}}] * 1000
    template = {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": {}}
    edit_json(checkpoint / "tokenizer.json", post_processor=template)
    with pytest.raises(ModelError, match="post_processor puts 1000 texts and 0 tokens into one"):
        load(checkpoint)


def test_what_published_tokenizers_do_passes(checkpoint: Path) -> None:
    steps = [{"type": "Prepend", "prepend": "_"}, replace(" ", "_"), {"type": "NFKC"},
             replace(" {2,}", "_", "Regex"), {"type": "Lowercase"}]  # fmt: skip
    edit_json(checkpoint / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": steps})
    assert load(checkpoint)("a b")["input_ids"]


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("tokenizer_config.json", {"tokenizer_class": 5}, "tokenizer_class is 5, expected a name"),
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template is 5, expected a text"),
        ("tokenizer_config.json", {"auto_map": "x"}, "auto_map is 'x', expected an object"),
        (
            "tokenizer_config.json",
            {"use_kernels": True},
            "with which Transformers would run kernels",
        ),
        ("tokenizer.json", {"model": None}, "has no tokenizer that loads"),
        ("tokenizer.json", {"added_tokens": None}, "has no tokenizer that loads"),
    ],
)
def test_values_of_other_types(
    checkpoint: Path, name: str, change: dict[str, Any], sentence: str
) -> None:
    edit_json(checkpoint / name, **change)
    with pytest.raises(ModelError, match=sentence):
        load(checkpoint)


def test_a_tokenizers_code_does_not_run(checkpoint: Path, tmp_path: Path) -> None:
    mark = tmp_path / "has run"
    (checkpoint / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass T: pass\n")
    code = {"AutoTokenizer": [None, "evil.T"]}
    edit_json(checkpoint / "tokenizer_config.json", auto_map=code, tokenizer_class="T")
    load(checkpoint)
    assert not mark.exists()


@pytest.mark.parametrize("text", ["[" * 5000, "[]", "", "\0"], ids=range(4))
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_files_that_are_no_json(checkpoint: Path, name: str, text: str) -> None:
    (checkpoint / name).write_text(text)
    with pytest.raises(ModelError, match=f"{name} (is not valid JSON|holds a list)"):
        load(checkpoint)


def ends_in_a_panic(*_: object, **__: object) -> None:
    kind: Callable[[str], BaseException] = type("PanicException", (BaseException,), {})
    raise kind("index out of bounds")


def test_a_panic_is_a_sentence(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", ends_in_a_panic)
    with pytest.raises(ModelError, match=r"no tokenizer that loads \(index out of bounds\)"):
        load(checkpoint)
