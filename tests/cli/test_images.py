"""Tests of `tandem run --image`: images before a message, and errors in one sentence."""

import json
from pathlib import Path

import pytest

from tandem.cli.main import main
from tests.hf.tiny import save_tiny_checkpoint
from tests.images import picture, save_image_checkpoint

pytest.importorskip("PIL", reason="Pillow is in the extra `images`")

GREEDY = ["--max-new-tokens", "4", "--temperature", "0", "--json", "--quiet"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_image_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / f"{seed}.png" for seed in range(2)]
    for seed, path in enumerate(paths):
        path.write_bytes(picture(seed))
    return [str(path) for path in paths]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main(["run", *words, "-p", "what is it?", *GREEDY]) == 0
    report: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return report


def test_images_stand_before_the_prompt(
    model: str, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    none = run(capsys, model)
    two = run(capsys, model, "--image", files[0], "--image", files[1])
    # 4 tokens of each image, 2 around them
    assert two["prompt_tokens"] == int(str(none["prompt_tokens"])) + 2 * 6


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("text.txt", "is not an image; expected PNG"), ("none.png", "cannot be read: No such file")],
)
def test_a_file_that_is_no_image_is_a_sentence(
    name: str, sentence: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("hello")
    path = str(tmp_path / name)
    assert main(["run", model, "-p", "hi", "--image", path]) == 2
    assert f"{path} {sentence}" in capsys.readouterr().err


def test_a_model_that_takes_no_images_is_a_sentence(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = str(save_tiny_checkpoint(tmp_path / "text"))
    assert main(["run", text, "-p", "hi", "--image", files[0]]) == 2
    assert "takes no images: its config.json has no image_token_id" in capsys.readouterr().err


def test_a_model_without_a_processor_is_a_sentence(
    files: list[str], model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = tmp_path / "lacking"
    lacking.mkdir()
    for file in Path(model).iterdir():
        if file.name != "preprocessor_config.json":
            (lacking / file.name).symlink_to(file)
    assert main(["run", str(lacking), "-p", "hi", "--image", files[0]]) == 2
    assert "has no processor for images" in capsys.readouterr().err
