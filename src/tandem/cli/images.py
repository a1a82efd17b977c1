"""Images for `tandem run --image` and the server, and the model's processor that reads them."""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.cli.model_choice import ModelChoice, find_model, import_transformers, load_tokenizer
from tandem.cli.streams import require_text
from tandem.core.errors import TandemError, UnsupportedModelError

if TYPE_CHECKING:
    from PIL.Image import Image

    from tandem.apis.images import ImageReader
    from tandem.generate.images import Processor

_log = logging.getLogger("tandem.server")


def add_images(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--image`."""
    parser.add_argument(
        "--image", action="append", metavar="FILE",
        help="an image before the first message: PNG, JPEG, WebP, GIF or BMP; repeatable",
    )  # fmt: skip


def open_images(files: Sequence[str]) -> "list[Image]":
    """Open the files of --image; raises `ConfigError` for the first file that is not an image."""
    if not files:
        return []
    from tandem.generate.images import open_image

    return [open_image(Path(require_text(file, "--image"))) for file in files]


def load_processor(choice: ModelChoice) -> "Processor":
    """Load the processor that formats a model's prompts with images.

    Call this before loading the model, which may take minutes, so that errors come early. Raises
    `UnsupportedModelError` if the model takes no images, and `ModelError` if it has no processor.
    """
    from tandem.generate.images import load_processor

    found = find_model(choice, quiet=True)
    import_transformers(quiet=True)
    token = image_token_id(found)
    if token is None:
        raise UnsupportedModelError(
            f"{found.model} takes no images: its config.json has no image_token_id; leave the "
            "images out, or take a vision-language model such as Qwen3.6-35B-A3B"
        )
    return load_processor(
        found.model, load_tokenizer(found), token, trust_remote_code=found.trust_remote_code
    )


def load_image_reader(found: ModelChoice, directory: Path | None) -> "ImageReader | None":
    """Return the reader of images in the server's requests; None if the model takes no images.

    Requests may name only files in `directory`. If the processor cannot be loaded, the log says
    why, and the reader refuses images.
    """
    from tandem.apis.images import ImageReader

    token = image_token_id(found)
    if token is None:
        return None
    try:
        from tandem.generate.images import load_processor

        processor = load_processor(
            found.model, load_tokenizer(found), token, trust_remote_code=found.trust_remote_code
        )
    except TandemError as error:
        _log.warning("requests with images are refused: %s", error)
        return ImageReader(processor=None, token_id=token, why_none=str(error))
    return ImageReader(processor=processor, token_id=token, directory=directory)


def image_token_id(found: ModelChoice) -> int | None:
    """Return the id of the image token in prompts; None if the model takes no images."""
    from tandem.hf.checkpoint import Checkpoint, open_model

    checkpoint = open_model(Path(found.model), may_run_code=found.trust_remote_code)
    if not isinstance(checkpoint, Checkpoint):
        return None
    token = checkpoint.config.get("image_token_id")
    has_tower = isinstance(checkpoint.config.get("vision_config"), dict)
    return token if has_tower and isinstance(token, int) else None
