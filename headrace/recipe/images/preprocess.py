"""Image file -> RGB pixels of the size that the model sees (spec 11.6), with Pillow.

Contract: the type comes from the first bytes of the file, limits are checked on its header before
anything is decoded, a damaged file raises ImageError. Pure and thread-safe; decoding and resizing
release the interpreter. Called by the server's image stage and the command line.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.recipe.conversation import ImageDetail, ImageSource
from headrace.recipe.images.source import ImageError, ImageLimits, image_files
from headrace.recipe.images.tokens import prepared_size, shrunk_to_low, token_count

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

DEFAULT_LIMITS = ImageLimits()
_PADDING = (127, 127, 127)
# What shines through transparent pixels.
_BACKGROUND = (253, 253, 253)
_WEBP_QUALITY = 90
# OpenCV's cubic kernel (-0.75) from the two that Pillow samples without smoothing: its cubic (-1)
# and linear. Exact at the outer taps, off by at most 2.4% between the inner two.
_CUBIC_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """pixels: width x height RGB bytes, row by row."""

    width: int
    height: int
    pixels: bytes = field(repr=False)

    @property
    def tokens(self) -> int:
        """Tokens in the prompt."""
        return token_count(self.width, self.height)

    def webp(self) -> bytes:
        """As the file that the official codec hands to an engine."""
        from PIL import Image

        file = io.BytesIO()
        image = Image.frombytes("RGB", (self.width, self.height), self.pixels)
        image.save(file, "WEBP", quality=_WEBP_QUALITY)
        return file.getvalue()


def prepare_images(
    sources: Sequence[ImageSource],
    fetched: Mapping[str, bytes] | None = None,
    limits: ImageLimits = DEFAULT_LIMITS,
) -> list[PreparedImage]:
    """All images of a prompt. fetched: bytes by URL. Raises ImageError naming the image."""
    images: list[PreparedImage] = []
    for file in image_files(sources, fetched or {}, limits):
        try:
            images.append(preprocess(file.data, file.source.detail, limits.side(len(sources))))
        except ImageError as error:
            raise file.named(error) from error
    return images


def image_tokens(
    sources: Sequence[ImageSource],
    fetched: Mapping[str, bytes] | None = None,
    limits: ImageLimits = DEFAULT_LIMITS,
) -> list[int]:
    """Tokens of each image, its placeholder included, from the headers alone."""
    tokens: list[int] = []
    for file in image_files(sources, fetched or {}, limits):
        try:
            size = _open(file.data, limits.side(len(sources))).size
        except ImageError as error:
            raise file.named(error) from error
        low = file.source.detail == ImageDetail.LOW
        tokens.append(token_count(*prepared_size(*size, low_detail=low)))
    return tokens


def preprocess(
    data: bytes, detail: str = ImageDetail.HIGH, max_side: int = DEFAULT_LIMITS.max_side
) -> PreparedImage:
    """Decode and resize one file. Raises ImageError for an unusable one."""
    from PIL import Image

    file = _open(data, max_side)
    try:
        file.load()
        image = _opaque(file)
    except Exception as error:  # hostile files raise anything in the decoders
        raise ImageError("EmptyImage") from error
    low = detail == ImageDetail.LOW
    width, height = prepared_size(*image.size, low_detail=low)
    small = shrunk_to_low(*image.size)
    if low and small != image.size:
        image = image.resize(small, Image.Resampling.HAMMING)
    scale = min(width / image.width, height / image.height)
    inner = (
        min(width, max(1, int(image.width * scale + 0.5))),
        min(height, max(1, int(image.height * scale + 0.5))),
    )
    canvas = Image.new("RGB", (width, height), _PADDING)
    place = (round((width - inner[0]) / 2), round((height - inner[1]) / 2))
    canvas.paste(_resized(image, inner), place)
    return PreparedImage(width, height, canvas.tobytes())


def _open(data: bytes, max_side: int) -> ImageFile:
    """The file with its header read."""
    if not data:
        raise ImageError("EmptyImage")
    plugin = _plugin(data)
    try:
        # Not Image.open: it tries every format, and complains of sizes that are allowed here.
        opener = getattr(importlib.import_module(f"PIL.{plugin}ImagePlugin"), f"{plugin}ImageFile")
        file: ImageFile = opener(io.BytesIO(data))
    except Exception as error:  # hostile files raise anything in the decoders
        raise ImageError("Decode") from error
    if min(file.size) < 1:
        raise ImageError("Decode")
    if max(file.size) > max_side:
        raise ImageError("ImageDimensionsTooLarge")
    return file


def _plugin(data: bytes) -> str:
    if data.startswith(b"\x89PNG"):
        return "Png"
    if data.startswith(b"\xff\xd8\xff"):
        return "Jpeg"
    if data.startswith(b"GIF"):
        return "Gif"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WebP"
    raise ImageError("UnsupportedMediaType")


def _opaque(image: Image) -> Image:
    """RGB pixels, transparency blended with the background."""
    from PIL import Image as images

    if image.mode.startswith("I"):
        # 16 bits a pixel.
        return (
            image.convert("I")
            .point(lambda value: value * (1 / 257) + 0.5)
            .convert("L")
            .convert("RGB")
        )
    keyed = "transparency" in image.info and image.mode in ("P", "RGB")
    if not keyed and image.mode not in ("RGBA", "LA", "PA"):
        return image.convert("RGB")
    image = image.convert("RGBA")
    result = images.new("RGB", image.size, _BACKGROUND)
    result.paste(image, mask=image.getchannel("A"))
    return result


def _resized(image: Image, size: tuple[int, int]) -> Image:
    """Cubic interpolation at the centres of the new pixels, without smoothing, as OpenCV does."""
    from PIL import Image as images

    if size == image.size:
        return image
    step = (image.width / size[0], 0.0, 0.0, 0.0, image.height / size[1], 0.0)
    linear, cubic = (
        image.transform(size, images.Transform.AFFINE, step, resample)
        for resample in (images.Resampling.BILINEAR, images.Resampling.BICUBIC)
    )
    return images.blend(linear, cubic, _CUBIC_SHARE)
