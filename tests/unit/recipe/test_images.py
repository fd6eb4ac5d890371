"""Images: token counts, limits and errors of a request's images, pixels that the model sees."""

from __future__ import annotations

import base64
import io
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from headrace.recipe.conversation import ImageDetail, ImageSource
from headrace.recipe.images.preprocess import image_tokens, prepare_images, preprocess
from headrace.recipe.images.source import ImageError, ImageLimits
from headrace.recipe.images.tokens import (
    MAX_TOKENS,
    PATCH,
    WEBP_SIDE,
    ImageSizeError,
    fitted_size,
    prepared_size,
    token_count,
)
from tests.unit.recipe import golden

CASES = golden.cases("image_tokens")
COUNTED = [case for case in CASES if "tokens" in case]
PREPROCESSED = [case for case in CASES if "preprocess" in case]
SIDES = st.integers(1, 8192) | st.integers(1, 60)
UNSUPPORTED = (
    "You have uploaded an unsupported image. Please make sure your image is valid and has one of "
    "the following formats: webp, png, jpeg, and gif."
)


def picture(width: int, height: int, color: Any = (200, 30, 30), mode: str = "RGB") -> Image.Image:
    return Image.new(mode, (width, height), color)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


SMALL = file_of(picture(3, 2))


def png_claiming(width: int, height: int) -> bytes:
    """SMALL with another size in its header."""
    header = SMALL[12:16] + width.to_bytes(4, "big") + height.to_bytes(4, "big") + SMALL[24:29]
    return SMALL[:12] + header + zlib.crc32(header).to_bytes(4, "big") + SMALL[33:]


def test_there_are_cases() -> None:
    assert (len(COUNTED), len(PREPROCESSED)) == (90, 14)
    assert len(CASES) == 104


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case["id"])
def test_golden_counts(case: dict[str, Any]) -> None:
    assert token_count(case["width"], case["height"]) == case["tokens"]


@pytest.mark.parametrize("case", PREPROCESSED, ids=lambda case: case["id"])
def test_golden_preprocessing(case: dict[str, Any]) -> None:
    source = ImageSource(
        data=file_of(picture(*case["preprocess"])), detail=ImageDetail(case["detail"])
    )
    if "error_kind" in case:
        with pytest.raises(ImageError) as caught:
            prepare_images([source])
        assert (caught.value.kind, caught.value.message) == (case["error_kind"], case["message"])
        return
    (image,) = prepare_images([source])
    assert [image.width, image.height] == case["out"]
    assert len(image.pixels) == image.width * image.height * 3
    assert [image.tokens] == image_tokens([source])


@given(SIDES, SIDES, st.booleans())
def test_sizes_are_whole_patches_within_the_budget(width: int, height: int, low: bool) -> None:
    size = prepared_size(width, height, low_detail=low)
    assert all(side % PATCH == 0 and 0 < side <= WEBP_SIDE for side in size)
    assert token_count(*size) <= MAX_TOKENS
    assert fitted_size(*size) == size


def test_a_size_that_never_rests_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.recipe.images.tokens.fit_once", lambda w, h: (w + 14, h))
    with pytest.raises(ImageSizeError, match="3 x 5"):
        token_count(3, 5)


@pytest.mark.parametrize(("width", "height", "tokens"), [(0, 0, 2), (0, 5, 3), (5, 0, 2)])
def test_nothing_has_a_count_too(width: int, height: int, tokens: int) -> None:
    assert token_count(width, height) == tokens
    assert token_count(0, 10**6) == MAX_TOKENS


def test_padding_is_grey_and_in_the_middle() -> None:
    # 640 x 480 becomes 644 x 483 in 644 x 490: 3.5 rounds to 4 rows above, 3 below.
    image = preprocess(file_of(picture(640, 480, (255, 255, 255))))
    rows = [image.pixels[y * image.width * 3] for y in range(image.height)]
    assert rows == [127] * 4 + [255] * 483 + [127] * 3


def pixel(data: bytes, x: int = 300, y: int = 300) -> tuple[int, ...]:
    image = preprocess(data)
    at = (y * image.width + x) * 3
    return tuple(image.pixels[at : at + 3])


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (file_of(picture(600, 600, (255, 0, 0, 0), "RGBA")), (253, 253, 253)),
        (file_of(picture(600, 600, (255, 0, 0, 100), "RGBA")), (254, 154, 154)),
        (
            file_of(picture(600, 600, (255, 0, 0, 100), "RGBA"), "WEBP", lossless=True),
            (254, 154, 154),
        ),
        (file_of(picture(600, 600, (10, 0), "LA")), (253, 253, 253)),
        (file_of(picture(600, 600, 100, "L")), (100, 100, 100)),
        (file_of(picture(600, 600, 100, "L"), transparency=100), (100, 100, 100)),
        (file_of(picture(600, 600, (10, 20, 30)), transparency=(10, 20, 30)), (253, 253, 253)),
        (file_of(picture(600, 600, 30_000, "I;16")), (117, 117, 117)),
        (file_of(picture(600, 600, 1, "1")), (255, 255, 255)),
        (file_of(picture(600, 600, 0, "P"), "GIF", transparency=0), (253, 253, 253)),
    ],
)
def test_colours(data: bytes, expected: tuple[int, ...]) -> None:
    assert pixel(data) == expected


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_picture_of_an_animation_counts(kind: str) -> None:
    red, blue = picture(600, 600, (255, 0, 0)), picture(600, 600, (0, 0, 255))
    seen = pixel(file_of(red, kind, save_all=True, append_images=[blue]))
    assert seen[0] > 250 > 5 > seen[2]


def test_the_web_file_has_the_same_picture() -> None:
    image = preprocess(file_of(picture(600, 400)))
    copy = Image.open(io.BytesIO(image.webp()))
    assert (copy.format, copy.size) == ("WEBP", (image.width, image.height))
    found = copy.convert("RGB").getpixel((300, 200))
    assert isinstance(found, tuple)
    assert max(abs(a - b) for a, b in zip(found, (200, 30, 30), strict=True)) < 6


NOISE = {kind: file_of(Image.effect_noise((90, 70), 60), kind) for kind in ("PNG", "JPEG", "GIF")}


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "EmptyImage"),
        (b"hello", "UnsupportedMediaType"),
        (file_of(picture(5, 5), "BMP"), "UnsupportedMediaType"),
        (file_of(picture(5, 5), "TIFF"), "UnsupportedMediaType"),
        (SMALL[:20], "Decode"),
        (b"\x89PNG", "Decode"),
        (NOISE["PNG"][:2000], "EmptyImage"),
        (NOISE["JPEG"][:30], "Decode"),
        (NOISE["JPEG"][:-900], "EmptyImage"),
        (NOISE["GIF"][:13], "Decode"),
        (file_of(picture(8193, 1)), "ImageDimensionsTooLarge"),
        # 100 megapixels in 70 bytes: refused by its header.
        (png_claiming(10_000, 10_000), "ImageDimensionsTooLarge"),
        (png_claiming(0, 5), "Decode"),
    ],
)
def test_unusable_files(data: bytes, kind: str) -> None:
    with pytest.raises(ImageError) as caught:
        preprocess(data)
    assert (caught.value.kind, caught.value.message) == (kind, UNSUPPORTED)


@settings(deadline=None)
@given(st.sampled_from(sorted(NOISE)), st.data())
def test_damaged_files_raise_nothing_else(kind: str, data: st.DataObject) -> None:
    damaged = bytearray(NOISE[kind])
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, min(len(damaged) - 1, 200)))] = data.draw(
            st.integers(0, 255)
        )
    try:
        assert preprocess(bytes(damaged[: data.draw(st.integers(1, len(damaged)))])).pixels
    except ImageError as error:
        assert error.message == UNSUPPORTED


def message(*sources: ImageSource, limits: ImageLimits | None = None) -> tuple[str, str]:
    texts = []
    for call in (prepare_images, image_tokens):
        with pytest.raises(ImageError) as caught:
            call(sources, None, limits or ImageLimits())
        texts.append((caught.value.kind, caught.value.message))
    assert texts[0] == texts[1]
    return texts[0]


def small(path: str = "", data: bytes = SMALL) -> ImageSource:
    return ImageSource(data=data, path=path)


def test_limits_of_a_request() -> None:
    limits = ImageLimits(max_images=3, max_bytes=2**20, max_total_bytes=2 * 2**20)
    assert message(*[small()] * 4, limits=limits) == (
        "TooManyImages",
        "Too many images: max 3 images per request, got 4",
    )
    assert message(small("p", SMALL + bytes(2**20)), limits=limits) == (
        "ImageTooLarge",
        "p.image[0]: image file size exceeds limit 1 MB",
    )
    full = small("p", SMALL.ljust(2**20, b"\0"))
    assert len(image_tokens([full] * 2, limits=limits)) == 2
    assert message(full, full, small(), limits=limits) == (
        "TotalSizeTooLarge",
        "Total image size exceeds the limit: max 2 MB per request, got 2 MB",
    )


def test_many_images_must_be_smaller() -> None:
    wide = small("m", file_of(picture(5000, 5)))
    assert len(image_tokens([*[small()] * 13, wide])) == 14
    assert message(*[small()] * 14, wide) == (
        "ImageDimensionsTooLarge",
        f"m.image[0]: {UNSUPPORTED}",
    )


def test_errors_name_the_place_among_images_of_the_same_path() -> None:
    # Empty files are found before any is decoded.
    sources = [small(), small("messages.0.content[1]", b"xx"), small("", b"")]
    assert message(*sources) == ("EmptyImage", f"image[1]: {UNSUPPORTED}")
    found = message(small("a"), small("a"), small("a", b"xx"))
    assert found == ("UnsupportedMediaType", f"a.image[2]: {UNSUPPORTED}")
    with pytest.raises(ImageError) as caught:
        prepare_images([small("a", b"xx")])
    assert caught.value.param == "a"


BASE64 = base64.b64encode(SMALL).decode()


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("data:text/plain;base64," + BASE64, "UnsupportedMediaType"),
        ("data:image/bmp;base64," + BASE64, "UnsupportedMediaType"),
        ("data:image/png," + BASE64, "UnsupportedMediaType"),
        ("data:image/png;base64,!!!", "InvalidDataUrl"),
        ("data:image/png;base64,", "EmptyImage"),
        ("data:", "InvalidDataUrl"),
        ("xx", "InvalidDataUrl"),
        ("", "InvalidDataUrl"),
    ],
)
def test_data_urls_that_are_refused(url: str, kind: str) -> None:
    assert message(ImageSource(data_url=url, path="m")) == (kind, f"m.image[0]: {UNSUPPORTED}")


@pytest.mark.parametrize(
    "head", ["data:image/png;base64,", "data:image/jpeg;base64,", "data:IMAGE/PNG;BASE64,"]
)
def test_data_urls(head: str) -> None:
    # The type of the file is what it begins with, whatever the URL says.
    assert image_tokens([ImageSource(data_url=head + BASE64)]) == [token_count(3, 2)]


def test_remote_images_are_fetched_by_somebody_else() -> None:
    url = "https://example.org/a.png"
    source = ImageSource(url=url, path="messages.0")
    assert image_tokens([source], {url: SMALL}) == [token_count(3, 2)]
    assert message(source) == (
        "Fetch",
        "messages.0.image[0]: Failed to download image from https://example.org/a.png",
    )
    assert message(ImageSource(url="ftp://a", path="p")) == (
        "InvalidUrl",
        'p: invalid url: "ftp://a"',
    )
