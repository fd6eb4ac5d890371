"""Images of a request: checks of their URLs, and their places in the text (spec recipe 6.6).

Contract: an image becomes an `ImageSource` without being fetched or turned into pixels; the parts
of one message are joined by blank lines. Called by every protocol module.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import InvalidRequest
from headrace.recipe.conversation import ImageDetail, ImageSource, PromptText
from headrace.recipe.protocols.data_url import data_url_bytes, parse_data_url

MAX_URL_BYTES = 8192
MEDIA_TYPES = frozenset(("image/jpeg", "image/jpg", "image/png", "image/gif", "image/webp"))
_FORMATS = "valid and has one of the following formats: webp, png, jpeg, and gif."
UNSUPPORTED_IMAGE = (
    f"You have uploaded an unsupported image. Please make sure your image is {_FORMATS}"
)
UNSUPPORTED_FILE = (
    f"You have uploaded an unsupported file. Please make sure your file is {_FORMATS}"
)
# What stands for an image in prompts of models that see none.
IMAGE_PLACEHOLDER = "[Unsupported Image]"


def is_http(url: str) -> bool:
    """Whether a URL is to be fetched (the test of the official codec: its first four letters)."""
    return url[:4].lower() == "http"


def image_from_url(
    url: str, detail: str | None, *, path: str, too_long: str | None = None
) -> ImageSource:
    """Source of an http(s) or data URL. too_long: the whole text when a link is too long."""
    size = ImageDetail.HIGH if detail is None else ImageDetail(detail)
    param = path.lstrip(".")
    if is_http(url):
        check_link(url, path=path, too_long=too_long)
        return ImageSource(url=url, detail=size, path=path)
    parsed = parse_data_url(url) if "base64," in url else None
    if parsed is None:
        raise InvalidRequest(f"{path}: Unsupported image_url format", param=param)
    if parsed.media_type not in MEDIA_TYPES:
        raise InvalidRequest(f"{path}: {UNSUPPORTED_IMAGE}", param=param)
    if data_url_bytes(parsed) is None:
        raise InvalidRequest(f"{path}: Invalid base64 data", param=param)
    return ImageSource(data_url=url, detail=size, path=path)


def check_file_data(data: str, *, path: str) -> None:
    """What the `file_data` of a file part must be before it is looked at as an image."""
    param = path.lstrip(".")
    parsed = parse_data_url(data)
    malformed = f"{path}: file_data is not a valid base64 data url"
    if parsed is None:
        raise InvalidRequest(malformed, param=param)
    if parsed.media_type not in MEDIA_TYPES:
        raise InvalidRequest(f"{path}: {UNSUPPORTED_FILE}", param=param)
    if data_url_bytes(parsed) is None:
        raise InvalidRequest(malformed, param=param)


def check_link(url: str, *, path: str, too_long: str | None = None) -> None:
    """InvalidRequest when an http(s) link is too long; data URLs may have any length."""
    if not is_http(url):
        return
    length = len(url.encode())
    if length > MAX_URL_BYTES:
        raise InvalidRequest(
            too_long
            or f"{path}: image_url.url external link length {length} too long, max link length "
            f"{MAX_URL_BYTES}. Consider passing file data directly with base64 data url instead.",
            param=path.lstrip("."),
        )


def join_parts(parts: Sequence[str | ImageSource]) -> PromptText:
    """Parts of one message, a blank line between them; an image is a place of its own."""
    texts: list[str] = []
    images: list[ImageSource] = []
    text: list[str] = []
    for number, part in enumerate(parts):
        if number:
            text.append("\n\n")
        if isinstance(part, str):
            text.append(part)
        else:
            texts.append("".join(text))
            text = []
            images.append(part)
    texts.append("".join(text))
    return PromptText(tuple(texts), tuple(images))
