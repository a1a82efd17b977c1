"""Tests of the measuring text: windows of every domain, none of it used for learning."""

from importlib import resources
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from tandem.core.errors import ConfigError, FileFormatError
from tandem.quality.texts import cut_windows, held_out_texts, read_texts, words_digest
from tests.hf.tiny import byte_tokenizer


def test_each_domain_gets_its_share_in_windows() -> None:
    windows = cut_windows({"a": "x" * 100, "b": "y" * 30}, byte_tokenizer(), 80, window=16)
    sizes = {name: [len(w.ids) for w in windows if w.domain == name] for name in ("a", "b")}
    assert sizes == {"a": [16, 16, 8], "b": [16, 14]}


def test_what_the_tokenizer_puts_before_a_text_begins_every_window() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    windows = cut_windows({"a": "x" * 40}, tokenizer, 40, window=16)
    assert [w.ids[0] for w in windows] == [1, 1, 1]
    assert [len(w.ids) for w in windows] == [16, 16, 11]


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ConfigError, match="the text a has 9 tokens; expected at least 16"):
        cut_windows({"a": "nine char"}, byte_tokenizer(), 100)


def test_other_words_have_another_digest() -> None:
    tokenizer, other = byte_tokenizer(), byte_tokenizer()
    windows = cut_windows({"a": "abc" * 20}, tokenizer, 40)
    assert words_digest(windows, tokenizer) == words_digest(windows, other)
    other.add_tokens(["abcabc"])
    assert words_digest(windows, other) == words_digest(windows, tokenizer)  # not in the text
    other_windows = cut_windows({"a": "abc" * 40}, other, 40)
    assert words_digest(other_windows, other) != words_digest(windows, tokenizer)


def test_the_held_out_text_is_in_no_text_that_is_learnt_from() -> None:
    texts = held_out_texts()
    assert len(texts) == 8
    learnt = resources.files("tandem.demo").joinpath("calibration.txt").read_text("utf-8")
    for text in texts.values():
        assert len(text.encode()) > 6000
        assert not any(line in learnt for line in text.splitlines() if len(line) > 60)


def test_files_are_domains_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "law.txt").write_text("§ 1", encoding="utf-8")
    (tmp_path / "odd.txt").write_bytes(b"ab\xff")
    assert read_texts([str(tmp_path / "law.txt")]) == {"law": "§ 1"}
    with pytest.raises(FileFormatError, match="the byte at 2 is not UTF-8"):
        read_texts([str(tmp_path / "odd.txt")])
    with pytest.raises(FileFormatError, match="found a folder; expected a text"):
        read_texts([str(tmp_path)])
