"""Images of request bodies: data URLs, and local files below a directory that the user allowed.

Nothing is downloaded: network addresses are refused. Torch is imported only if the model takes
images.
"""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from tandem.apis.errors import ApiError
from tandem.apis.schemas import ImagePart, TextPart

if TYPE_CHECKING:
    from tandem.decode.images import ImagePrompt
    from tandem.generate.images import Processor

TEXT_ONLY = "this server's model reads text only; send no images"
_MOST_IMAGES = 128
# Limit for all images of one request together: decoded, they take 400 MB.
_MOST_PIXELS = 1 << 27
_AS_DATA = "send it as a data URL (data:image/png;base64,...)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReader:
    """Opens the images of requests; the model's processor turns them into prompt tokens."""

    processor: "Processor | None"
    """The model's image processor; None if it did not load, for the reason in `why_none`."""
    token_id: int
    """The id of the image placeholder token."""
    directory: Path | None = None
    """The directory below which requests may name image files; None: requests may name none."""
    why_none: str | None = None
    """The reason for refusing requests with images, as a sentence; None: they are accepted."""

    def write(self, text: str, sources: Sequence[str]) -> "ImagePrompt":
        """Return a prompt's token ids and images; `text` must have a placeholder for each image.

        Raises `ApiError` or `ConfigError` for a source that is no image or must not be read.
        """
        from tandem.generate.images import open_image, write_prompt

        if self.processor is None:
            raise ApiError(400, self.why_none or TEXT_ONLY)
        if len(sources) > _MOST_IMAGES:
            raise ApiError(
                400, f"the request has {len(sources)} images; at most {_MOST_IMAGES} are allowed"
            )
        images, num_pixels = [], 0
        for number, source in enumerate(sources, 1):
            image = open_image(self._found(source, number), f"image {number}")
            num_pixels += image.width * image.height
            if num_pixels > _MOST_PIXELS:
                raise ApiError(
                    400,
                    f"the request's images have more than {_MOST_PIXELS} pixels in total; "
                    "send smaller ones, or fewer",
                )
            images.append(image)
        return write_prompt(self.processor, text, images, self.token_id)

    def _found(self, source: str, number: int) -> bytes | Path:
        """Return a data URL's bytes or a file URL's path; `ApiError` for any other source."""
        scheme = source[:8].lower().partition(":")[0]
        if scheme == "data":
            return _decoded(source, number)
        if scheme == "file":
            return self._file(source, number)
        if scheme in ("http", "https"):
            raise ApiError(
                400, f"image {number} is an address, and this server downloads nothing; {_AS_DATA}"
            )
        raise ApiError(400, f"image {number} is not a data URL; {_AS_DATA}")

    def _file(self, source: str, number: int) -> Path:
        if self.directory is None:
            raise ApiError(
                400,
                f"image {number} is a local file, and this server reads none; {_AS_DATA}, or "
                "start the server with --image-files DIRECTORY",
            )
        try:
            parts = urlsplit(source)
            path = Path(unquote(parts.path)).resolve()
            is_ours = parts.netloc in ("", "localhost") and path.is_relative_to(self.directory)
            is_there = is_ours and path.is_file()
        except (OSError, ValueError):  # a name that no file can have
            is_there = False
        if not is_there:  # do not reveal whether files exist elsewhere
            raise ApiError(
                400, f"image {number} is not a file below the directory that this server may read"
            )
        return path


def _decoded(source: str, number: int) -> bytes:
    head, _, data = source.partition(",")
    try:
        if not head.lower().endswith(";base64"):
            raise binascii.Error
        return base64.b64decode(data)
    except (binascii.Error, ValueError):
        raise ApiError(400, f"image {number} is not base64; {_AS_DATA}") from None


def allowed_directory(name: str | None) -> Path | None:
    """Return the path of the directory below which requests may name files; None for None.

    Raises `ConfigError` if there is no such directory.
    """
    from tandem.core.errors import ConfigError

    if name is None:
        return None
    directory = Path(name).expanduser().resolve()
    if not directory.is_dir():
        raise ConfigError(
            f"image_files is {name!r}, which is not a directory; name one that exists"
        )
    return directory


def content_of(parts: Sequence[TextPart | ImagePart]) -> str | list[dict[str, object]]:
    """Return a message's content for a chat template: a string, or a list if it has images."""
    if not any(isinstance(part, ImagePart) for part in parts):
        return "\n".join(part.text for part in parts if isinstance(part, TextPart))
    return [
        {"type": "image", "image": part.url}
        if isinstance(part, ImagePart)
        else {"type": "text", "text": part.text}
        for part in parts
    ]
