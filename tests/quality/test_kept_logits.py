"""Tests of logits in a file: read as written, to fp16, or a one-sentence error."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tandem.core.errors import FileFormatError
from tandem.quality.kept_logits import KeptLogits, LogitsWriter
from tandem.quality.texts import Window

WINDOWS = [Window("a", (5, 6, 7)), Window("a", (8,)), Window("b", (9, 1, 2, 3))]


def write(path: Path, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Write logits two tokens at a time; return them by window."""
    torch.manual_seed(0)
    logits = [(20 * torch.randn(len(w.ids), 11)).to(dtype) for w in WINDOWS]
    logits[0][1, 4] = -torch.inf  # a model may forbid tokens
    with LogitsWriter(path, WINDOWS, "digest") as writer:
        for number, rows in enumerate(logits):
            for piece in rows.split(2):
                writer.add(number, piece)
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_is_the_same_distribution(tmp_path: Path, dtype: torch.dtype) -> None:
    logits = write(tmp_path / "kept", dtype)
    kept = KeptLogits(tmp_path / "kept")
    assert (kept.windows, kept.words, kept.vocabulary) == (WINDOWS, "digest", 11)
    for number, rows in enumerate(logits):
        found = kept.of_window(number).float().softmax(-1)
        torch.testing.assert_close(found, rows.float().softmax(-1), rtol=0.02, atol=1e-5)
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]


def break_off(path: Path) -> None:
    """Write only a part, as if interrupted by Ctrl-C."""
    with LogitsWriter(path, WINDOWS, "digest") as writer:
        writer.add(0, torch.zeros(3, 11))
        raise KeyboardInterrupt


def test_nothing_stays_of_a_run_that_broke_off(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        break_off(tmp_path / "kept")
    assert not list(tmp_path.iterdir())


def test_damage_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    write(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(FileFormatError, match=r"kept is damaged .* keep the logits again"):
        KeptLogits(path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    kept = KeptLogits(path)
    kept.of_window(0)
    with pytest.raises(FileFormatError, match="window 2 have another checksum"):
        kept.of_window(2)
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(FileFormatError, match="has no logits of tandem quality --keep"):
        KeptLogits(path)
