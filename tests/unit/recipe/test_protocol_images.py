"""Images in requests: which URLs are images, and where they stand in the text."""

from __future__ import annotations

import pytest

from headrace.errors import InvalidRequest
from headrace.recipe.conversation import ImageDetail, ImageSource
from headrace.recipe.protocols.data_url import data_url_bytes, parse_data_url
from headrace.recipe.protocols.images import (
    check_file_data,
    check_link,
    image_from_url,
    is_http,
    join_parts,
)

PNG = "data:image/png;base64,"


@pytest.mark.parametrize(
    "url",
    [
        PNG + "AAAA",
        PNG + "AAA",
        PNG + "AA==",
        PNG + "AB",
        PNG,
        PNG + " AA\tA\nA\r\f",
        PNG + "AAAA#fragment",
        PNG + "AA%3D%3d",
        " DATA:image/png;base64,AAAA\n",
        "da\nta:ima\tge/png;base64,AAAA",
        "data:IMAGE/JPEG;charset=x;  base64,AA",
        "data: image/png ;base64,AAAA",
        "data:image/jpg;base64,AA",
        "data:image/png,base64,AAAA",
    ],
)
def test_data_urls_of_images(url: str) -> None:
    source = image_from_url(url, "low", path="p")
    assert source == ImageSource(data_url=url, detail=ImageDetail.LOW, path="p")
    check_file_data(url, path="p")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("zz", "Unsupported image_url format"),
        ("", "Unsupported image_url format"),
        ("image/png;base64,AAAA", "Unsupported image_url format"),
        ("xdata:image/png;base64,AAAA", "Unsupported image_url format"),
        ("data:image/png;BASE64,AAAA", "Unsupported image_url format"),
        ("data:image/png#;base64,AAAA", "Unsupported image_url format"),
        ("data:image/bmp;base64,AAAA", "You have uploaded an unsupported image."),
        ("data:;base64,AAAA", "You have uploaded an unsupported image."),
        ("data:image/ png;base64,AAAA", "You have uploaded an unsupported image."),
        ("data:image/png base64,AAAA", "You have uploaded an unsupported image."),
        (PNG + "A", "Invalid base64 data"),
        (PNG + "AA=", "Invalid base64 data"),
        (PNG + "AA%3", "Invalid base64 data"),
        (PNG + "A-_A", "Invalid base64 data"),
        (PNG + "AAAA=", "Invalid base64 data"),
        (PNG + "AAAA====", "Invalid base64 data"),
        (PNG + "AA==AA==", "Invalid base64 data"),
        (PNG + "é", "Invalid base64 data"),
    ],
)
def test_what_is_no_image(url: str, problem: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        image_from_url(url, None, path=".messages[0]")
    assert caught.value.message.startswith(f".messages[0]: {problem}")
    assert caught.value.param == "messages[0]"


def test_file_data_has_texts_of_its_own() -> None:
    for data, problem in (
        ("http://x", "file_data is not a valid base64 data url"),
        (PNG + "@@@@", "file_data is not a valid base64 data url"),
        ("data:application/pdf;base64,@@", "You have uploaded an unsupported file."),
    ):
        with pytest.raises(InvalidRequest) as caught:
            check_file_data(data, path="p")
        assert caught.value.message.startswith(f"p: {problem}")


def test_links() -> None:
    assert image_from_url("HTtp", None, path="p") == ImageSource(url="HTtp", path="p")
    assert not is_http(" http://x")
    check_link(PNG + "A" * 9000, path="p")
    long = "http://" + "é" * 4093
    with pytest.raises(InvalidRequest, match=r"^p: image_url.url external link length 8193 too"):
        check_link(long, path="p")
    with pytest.raises(InvalidRequest, match=r"^own text$"):
        image_from_url(long, None, path="p", too_long="own text")


def test_bodies_of_data_urls() -> None:
    for url, data in (
        (PNG + "aGk", b"hi"),
        ("data:,h%69\n", b"hi"),
        ("data:;base64,a%47k=", b"hi"),
    ):
        parsed = parse_data_url(url)
        assert parsed is not None
        assert data_url_bytes(parsed) == data


def test_parts_are_joined_by_blank_lines() -> None:
    image = ImageSource(url="http://x")
    assert join_parts([]).parts == ("",)
    assert join_parts(["", ""]).parts == ("\n\n",)
    joined = join_parts(["a", image, image, "b"])
    assert joined.shown("<i>") == "a\n\n<i>\n\n<i>\n\nb"
    assert joined.parts == ("a\n\n", "\n\n", "\n\nb")
    assert joined.images == (image, image)
