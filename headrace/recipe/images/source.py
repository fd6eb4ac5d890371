"""Image source -> file bytes: data URLs are decoded, limits per request are kept.

Contract: nothing is fetched here. Whoever serves requests fetches the http(s) URLs and passes their
bytes as `fetched`. Errors carry the official texts and begin with the place of the image in the
request. Used by `preprocess.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.errors import InvalidRequest
from headrace.recipe.conversation import ImageSource
from headrace.recipe.protocols.data_url import data_url_bytes, parse_data_url
from headrace.recipe.protocols.images import MEDIA_TYPES, UNSUPPORTED_IMAGE, is_http

_MIB = 2**20


class ImageError(InvalidRequest):
    """An image cannot be used. kind: the official name of the failure."""

    def __init__(self, kind: str, message: str = UNSUPPORTED_IMAGE, *, param: str | None = None):
        super().__init__(message, param=param)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What one request may carry.

    max_side: pixels; `max_side_of_many` holds instead in a request with `many_images` or more.
    """

    max_images: int = 600
    max_bytes: int = 32 * _MIB
    max_total_bytes: int = 64 * _MIB
    max_side: int = 8192
    many_images: int = 15
    max_side_of_many: int = 4096

    def side(self, images: int) -> int:
        """The longest side allowed in a request with so many images."""
        return self.max_side_of_many if images >= self.many_images else self.max_side


@dataclass(frozen=True, slots=True)
class ImageFile:
    """The encoded bytes of a source. place: how errors name it, such as `messages.0.image[1]`."""

    source: ImageSource
    place: str
    data: bytes = field(repr=False)

    def named(self, error: ImageError) -> ImageError:
        """The same error with the place of the image in front."""
        return _at(self.source, self.place, error)


def image_files(
    sources: Sequence[ImageSource], fetched: Mapping[str, bytes], limits: ImageLimits
) -> list[ImageFile]:
    """Bytes of all images of a request, in order. Raises ImageError for the first that fails."""
    if len(sources) > limits.max_images:
        raise ImageError(
            "TooManyImages",
            f"Too many images: max {limits.max_images} images per request, got {len(sources)}",
        )
    files: list[ImageFile] = []
    numbers: Counter[str] = Counter()
    for source in sources:
        place = f"{source.path}.image[{numbers[source.path]}]".lstrip(".")
        numbers[source.path] += 1
        try:
            data = _image_bytes(source, fetched)
            if not data:
                raise ImageError("EmptyImage")
            if len(data) > limits.max_bytes:
                limit = f"image file size exceeds limit {limits.max_bytes // _MIB} MB"
                raise ImageError("ImageTooLarge", limit)
        except ImageError as error:
            raise _at(source, place, error) from error
        files.append(ImageFile(source, place, data))
    total = sum(len(file.data) for file in files)
    if total > limits.max_total_bytes:
        raise ImageError(
            "TotalSizeTooLarge",
            f"Total image size exceeds the limit: max {limits.max_total_bytes // _MIB} MB per "
            f"request, got {total // _MIB} MB",
        )
    return files


def _at(source: ImageSource, place: str, error: ImageError) -> ImageError:
    if error.kind == "InvalidUrl":
        place = source.path
    return ImageError(error.kind, f"{place}: {error.message}", param=source.path or None)


def _image_bytes(source: ImageSource, fetched: Mapping[str, bytes]) -> bytes:
    if source.data is not None:
        return source.data
    if source.data_url is not None:
        parsed = parse_data_url(source.data_url)
        if parsed is None:
            raise ImageError("InvalidDataUrl")
        if parsed.media_type not in MEDIA_TYPES:
            raise ImageError("UnsupportedMediaType")
        data = data_url_bytes(parsed)
        if data is None:
            raise ImageError("InvalidDataUrl")
        return data
    url = source.url or ""
    if url not in fetched:
        if not is_http(url):
            quoted = msgspec.json.encode(url).decode()
            raise ImageError("InvalidUrl", f"invalid url: {quoted}")
        raise ImageError("Fetch", f"Failed to download image from {url}")
    return fetched[url]
