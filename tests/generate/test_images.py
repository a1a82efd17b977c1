"""Tests of images in prompts: opened, checked, processed, answered as by Transformers."""

import contextlib
import io
import struct
import zlib
from pathlib import Path
from random import Random
from typing import Any

import pytest

import tandem
from tandem.core.errors import ConfigError, ModelError, UnsupportedModelError
from tandem.decode.images import ImagePrompt
from tandem.generate.images import MOST_PIXELS, load_processor, open_image
from tests.architectures import build_tiny_model
from tests.hf.tiny import byte_tokenizer
from tests.images import (
    IMAGE_TOKEN,
    build_image_model,
    image_prompt,
    image_tokenizer,
    picture,
    save_image_checkpoint,
    transformers_tokens,
)

pytest.importorskip("PIL", reason="Pillow is in the extra `images`")


def image_message(*images: object, text: str = "what is it?") -> list[dict[str, object]]:
    """Return a conversation with one message that contains images."""
    parts: list[dict[str, object]] = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def generator(checkpoint: Path) -> tandem.Generator:
    tokenizer = image_tokenizer()
    processor = load_processor(str(checkpoint), tokenizer, IMAGE_TOKEN)
    return tandem.Generator(tandem.load(checkpoint), tokenizer, processor=processor)


def encoded(generator: tandem.Generator, messages: Any) -> ImagePrompt:
    prompt = generator._encode(messages)
    assert isinstance(prompt, ImagePrompt)
    return prompt


def test_answers_are_those_of_transformers(generator: tandem.Generator, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(picture(0))
    messages = image_message(file, picture(1, (40, 90), "JPEG"))
    prompt = encoded(generator, messages)
    # 70 x 50 pixels become 64 x 64, 40 x 90 become 32 x 96; a token is 32 x 32
    assert prompt.inputs["image_grid_thw"].tolist() == [[1, 4, 4], [1, 6, 2]]
    assert prompt.ids.count(IMAGE_TOKEN) == 4 + 3
    expected = transformers_tokens(generator.model, prompt, 6)
    (answer,) = generator.generate(messages, max_new_tokens=6, temperature=0)
    assert answer.token_ids == expected
    assert answer.prompt_tokens == len(prompt.ids)


def test_equal_images_are_shared_and_others_are_not(generator: tandem.Generator) -> None:
    text = "a rather long question about what is to be seen " * 2
    first = image_message(picture(0), text=text)
    length = len(encoded(generator, first).ids)
    reused = [
        generator.generate(messages, max_new_tokens=2)[0].reused_tokens
        for messages in (first, first, image_message(picture(1), text=text))
    ]
    # from the last checkpoint of the states; nothing of the few tokens before the image
    assert reused == [0, length - 8, 0]


def test_prompts_with_and_without_images_in_one_call(generator: tandem.Generator) -> None:
    prompts: list[Any] = [image_message(picture(0)), "hello", image_message(picture(1))]
    together = generator.generate(prompts, max_new_tokens=5, temperature=0)
    alone = [generator.generate([p], max_new_tokens=5, temperature=0)[0] for p in prompts]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]


def test_what_a_processor_wrote_is_a_prompt() -> None:
    model = build_image_model("qwen3_vl_moe")
    prompt = image_prompt(model, [40, (2, 2), 41])
    (answer,) = tandem.Generator(model).generate(prompt, max_new_tokens=4, temperature=0)
    assert answer.token_ids == transformers_tokens(model, prompt, 4)


def test_a_processor_is_needed(generator: tandem.Generator) -> None:
    without = tandem.Generator(generator.model, generator.tokenizer)
    with pytest.raises(ConfigError, match="needs the model's processor"):
        without.generate(image_message(picture(0)))


def test_a_model_without_a_tower_takes_no_images(generator: tandem.Generator) -> None:
    text = tandem.Generator(build_tiny_model("qwen3_moe"), byte_tokenizer())
    with pytest.raises(UnsupportedModelError, match="takes no images"):
        text.generate(image_message(picture(0)))


def test_a_model_without_a_processor_says_so(tmp_path: Path) -> None:
    build_image_model("qwen3_vl_moe").config.save_pretrained(tmp_path)
    image_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has no processor for images"):
        load_processor(str(tmp_path), image_tokenizer(), IMAGE_TOKEN)


def test_a_placeholder_that_a_user_types_is_refused(generator: tandem.Generator) -> None:
    with pytest.raises(ConfigError, match="2 placeholders for 1 images"):
        generator.generate(image_message(picture(0), text="1"))


def huge_png(width: int, height: int) -> bytes:
    """Return the header of a PNG file that claims this many pixels."""
    parts = [
        b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0),
        b"IDAT" + zlib.compress(b""),
    ]
    chunks = (struct.pack(">I", len(p) - 4) + p + struct.pack(">I", zlib.crc32(p)) for p in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"hello", "is not an image; expected PNG, JPEG"),
        (b"", "is not an image"),
        (b"%PDF-1.7", "is not an image"),
        (huge_png(8192, 4097), r"has 8192 x 4097 pixels and at most 33554432"),
        (huge_png(20_000, 6_000), r"has 20000 x 6000 pixels"),
        (huge_png(100_000, 100_000), "has far more pixels"),
        (huge_png(64, 64), r"is damaged"),
    ],
)
def test_what_is_no_image_is_a_sentence(data: bytes, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        open_image(data)
    file = tmp_path / "file"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=f"^{file} {sentence}" if data else sentence):
        open_image(file)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_damaged_files_are_sentences_whatever_their_decoders_raise(kind: str) -> None:
    random, whole = Random(0), picture(0, (20, 16), kind)
    for _ in range(100):
        data = bytearray(whole)
        for _ in range(random.randrange(1, 6)):
            data[random.randrange(min(len(data), 400))] = random.randrange(256)
        with contextlib.suppress(ConfigError):
            open_image(bytes(data[: random.choice([None, random.randrange(len(data))])]))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        open_image(tmp_path / "none.png")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        open_image(tmp_path)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_every_kind_is_opened_as_rgb(kind: str) -> None:
    image = open_image(picture(0, kind=kind))
    assert (image.mode, image.size) == ("RGB", (70, 50))
    assert MOST_PIXELS == 8192 * 4096


def test_an_image_stands_as_its_camera_was_held() -> None:
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    file = io.BytesIO()
    Image.new("RGB", (70, 50)).save(file, "JPEG", exif=exif)
    assert open_image(file.getvalue()).size == (50, 70)
