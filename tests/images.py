"""Tiny random models that take images, and prompts with images for them."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.decode.images import ImagePrompt
from tests.architectures import build_tiny_model
from tests.hf.tiny import byte_tokenizer

IMAGE_TOKEN = 20
# The texts of the placeholder and of the tokens around it, in the tokenizer of tiny models.
IMAGE, BEGIN, END = "1", "3", "4"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}"
    + BEGIN + IMAGE + END
    + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)  # fmt: skip
# By architecture: values that its configuration needs beside tiny sizes.
MODELS = {
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}


def build_image_model(name: str) -> Any:
    """Build a tiny random model of an architecture with its tower."""
    values = {
        "image_token_id": IMAGE_TOKEN, "video_token_id": IMAGE_TOKEN + 1,
        "vision_start_token_id": IMAGE_TOKEN + 2, "vision_end_token_id": IMAGE_TOKEN + 3,
    }  # fmt: skip
    return build_tiny_model(name, class_name=MODELS[name], values=values)


def image_prompt(
    model: Any, parts: Sequence[int | Sequence[int]], seeds: Sequence[int] = (0, 1, 2)
) -> ImagePrompt:
    """Return a prompt of token ids and images (height, width), given in tokens.

    The seeds decide the images' random pixels.
    """
    vision = model.config.vision_config
    merge = vision.spatial_merge_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    ids: list[int] = []
    keys: list[int] = []
    grids, pixels = [], []
    images = iter(seeds)
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            keys.append(part)
            continue
        seed = next(images)
        rows, columns = part
        grids.append((1, rows * merge, columns * merge))
        random = np.random.default_rng(seed)
        size = (rows * columns * merge**2, width)
        pixels.append(random.normal(size=size).astype(np.float32))
        ids += [IMAGE_TOKEN] * rows * columns
        keys += [-1 - seed] * rows * columns
    inputs = {
        "pixel_values": np.concatenate(pixels),
        "image_grid_thw": np.array(grids),
        "mm_token_type_ids": np.array([[int(token == IMAGE_TOKEN) for token in ids]]),
    }
    return ImagePrompt(tuple(ids), tuple(keys), inputs)


def transformers_tokens(model: Any, prompt: ImagePrompt, count: int) -> list[int]:
    """Return the tokens of Transformers' own `generate`."""
    ids = torch.tensor([prompt.ids])
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), **prompt.tensors(),
        max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return list(out[0, ids.shape[1] :].tolist())


def image_tokenizer() -> Any:
    """Return the tokenizer of tiny models, which writes a placeholder for an image."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE, BEGIN, END]})
    assert tokenizer.convert_tokens_to_ids(IMAGE) == IMAGE_TOKEN
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_image_checkpoint(directory: Path, name: str = "qwen3_5_moe") -> Path:
    """Write a tiny model that takes images, its tokenizer and its image processor."""
    build_image_model(name).save_pretrained(directory)
    image_tokenizer().save_pretrained(directory)
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor",
        "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
        "min_pixels": 32 * 32, "max_pixels": 96 * 96,
    }  # fmt: skip
    (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return directory


def picture(seed: int = 0, size: tuple[int, int] = (70, 50), kind: str = "PNG") -> bytes:
    """Return an image file of random pixels; needs Pillow."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()
