"""Images in prompts: opens and checks them; the model's processor writes them into the prompt.

`tandem.decode.images` runs the model's vision tower on the result.
"""

import hashlib
import io
import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tandem.core.errors import ConfigError, ModelError, first_line
from tandem.decode.images import ImagePrompt
from tandem.foreign_types import Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

# 32 Mi pixels (8192 x 4096). Vision towers read far fewer; a larger image is made to fill memory.
MOST_PIXELS = 1 << 25
_MOST_BYTES = 4 * MOST_PIXELS  # of a file; a longer one is cut and then reported as damaged
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_NEEDS = 'pip install "tandem-moe[images]"'


class Processor(Protocol):
    """The part of Transformers' processors that is used here."""

    def apply_chat_template(self, conversation: object, **options: Any) -> Any:
        """Return a conversation as text, with a placeholder for each image."""

    def __call__(self, *, text: Sequence[str], images: Sequence[object], **options: Any) -> Any:
        """Return the inputs of a model's forward for a text with images, by name."""


class JoinedProcessor:
    """A processor made of a tokenizer and an image processor that reports patch grids.

    It replaces the processors of Qwen's and GLM's models, which need torchvision for videos.
    """

    def __init__(self, tokenizer: Tokenizer, image_processor: Any, image_token_id: int) -> None:
        """Take both parts; `image_token_id` is the token that a chat template writes per image."""
        self._tokenizer, self._images = tokenizer, image_processor
        self._image_token_id = image_token_id

    def apply_chat_template(self, conversation: object, **options: Any) -> Any:
        """Return a conversation as text, with a placeholder for each image."""
        return self._tokenizer.apply_chat_template(conversation, **options)

    def __call__(self, *, text: Sequence[str], images: Sequence[object], **options: Any) -> Any:
        """Return the inputs of a model's forward, by name: one text's ids, and its images.

        Each placeholder is repeated as often as its image has merged patches. Raises `ValueError`
        unless the text has one placeholder per image.
        """
        encoded = dict(self._images(images=images, return_tensors="np"))
        counts = encoded["image_grid_thw"].prod(-1) // self._images.merge_size**2
        (written,) = self._tokenizer(list(text), add_special_tokens=False)["input_ids"]
        if written.count(self._image_token_id) != len(counts):
            raise ValueError(
                f"the prompt has {written.count(self._image_token_id)} placeholders for "
                f"{len(counts)} images"
            )
        left = iter(counts.tolist())
        ids = [
            token
            for one in written
            for token in itertools.repeat(one, next(left) if one == self._image_token_id else 1)
        ]
        types = np.array([[int(token == self._image_token_id) for token in ids]])
        return {**encoded, "input_ids": np.array([ids]), "mm_token_type_ids": types}


def load_processor(
    source: str, tokenizer: Tokenizer, image_token_id: int, *, trust_remote_code: bool = False
) -> Processor:
    """Load the processor in a model's directory; `ModelError` if there is none for images."""
    require_pillow()
    from transformers import AutoImageProcessor, AutoProcessor

    options = {"trust_remote_code": trust_remote_code, "local_files_only": not trust_remote_code}
    try:
        try:
            processor: Any = AutoProcessor.from_pretrained(source, **options)
        except (ImportError, AttributeError):  # its video processor needs torchvision
            images = AutoImageProcessor.from_pretrained(source, **options)
            if not hasattr(images, "merge_size"):
                raise
            return JoinedProcessor(tokenizer, images, image_token_id)
    except Exception as error:  # Transformers raises no narrower class
        raise ModelError(_no_processor(source, first_line(error))) from error
    if getattr(processor, "image_processor", None) is None:
        raise ModelError(_no_processor(source, "its files name none"))
    return processor  # type: ignore[no-any-return]


def _no_processor(source: str, why: str) -> str:
    return (
        f"{source} has no processor for images ({why}); copy preprocessor_config.json and "
        "processor_config.json from where the model comes from"
    )


def require_pillow() -> None:
    """Raise `ConfigError` unless Pillow, which opens images, is installed."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"images need Pillow, which is not installed; {_NEEDS}") from error


def open_image(source: "str | Path | bytes | Image", name: str = "") -> "Image":
    """Return an image as RGB; error messages call it `name`.

    Raises `ConfigError` if the source is not an image or has more than `MOST_PIXELS` pixels.
    """
    require_pillow()
    from PIL import Image, ImageOps

    if isinstance(source, Image.Image):
        found, name = source, name or "the image"
    else:
        name = name or (str(source) if isinstance(source, str | Path) else "the file")
        found = _opened(source, name)
    width, height = found.size
    if not 0 < width * height <= MOST_PIXELS:
        raise ConfigError(
            f"{name} has {width} x {height} pixels and at most {MOST_PIXELS} are read; "
            "make it smaller"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ImageOps.exif_transpose(found).convert("RGB")
    # Pillow decodes the pixels here; its decoders raise errors of many classes.
    except Exception as error:
        raise ConfigError(f"{name} is damaged ({first_line(error)}); give another one") from error


def _opened(source: str | Path | bytes, name: str) -> "Image":
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            # Pillow's own limit gives a warning or an error depending on size. Ours is checked
            # right after this.
            warnings.simplefilter("ignore")
            data = source if isinstance(source, bytes) else _read(Path(source).expanduser())
            return Image.open(io.BytesIO(data), formats=_FORMATS)
    except Image.DecompressionBombError as error:
        raise ConfigError(
            f"{name} has far more pixels than the {MOST_PIXELS} that are read; make it smaller"
        ) from error
    except UnidentifiedImageError as error:
        kinds = ", ".join(_FORMATS)
        raise ConfigError(f"{name} is not an image; expected {kinds}") from error
    except Exception as error:  # a damaged header may raise anything
        raise ConfigError(f"{name} cannot be read: {first_line(error)}") from error


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MOST_BYTES)


def write_prompt(
    processor: Processor, text: str, images: "Sequence[Image]", image_token_id: int
) -> ImagePrompt:
    """Return the token ids and image inputs that the model's processor makes of a prompt.

    `text` must have a placeholder for each image. Raises `ConfigError` if the processor fails.
    """
    try:
        encoded = dict(processor(text=[text], images=list(images), return_tensors="np"))
    except Exception as error:  # a processor is a program that came with the model
        raise ConfigError(
            f"the model's processor cannot read this prompt: {first_line(error)}"
        ) from error
    ids = tuple(int(token) for token in np.asarray(encoded.pop("input_ids"))[0])
    encoded.pop("attention_mask", None)
    keys = _keys(ids, images, image_token_id)
    inputs = {name: np.asarray(value) for name, value in encoded.items()}
    return ImagePrompt(ids, keys, inputs)


def _keys(ids: tuple[int, ...], images: "Sequence[Image]", image_token_id: int) -> tuple[int, ...]:
    """Return the ids with each placeholder replaced by a negative hash of its image.

    A group of consecutive placeholders belongs to one image. If there are more or fewer groups than
    images, every placeholder is replaced by one hash of all images.
    """
    digests = [hashlib.blake2b(f"{one.size}".encode() + one.tobytes()).digest() for one in images]
    runs = [
        (is_image, list(run)) for is_image, run in itertools.groupby(ids, image_token_id.__eq__)
    ]
    if sum(is_image for is_image, _ in runs) != len(images):
        digests = [hashlib.blake2b(b"".join(digests)).digest()] * len(ids)
    left = iter(digests)
    keys: list[int] = []
    for is_image, run in runs:
        keys += [-1 - int.from_bytes(next(left)[:7])] * len(run) if is_image else run
    return tuple(keys)
