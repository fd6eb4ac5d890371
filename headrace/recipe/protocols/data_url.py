"""Data URLs as the official codec reads them: the rules of WHATWG, forgiving base64 included.

Contract: `parse_data_url` takes a URL apart, `data_url_bytes` decodes it; both give None for what
browsers would refuse. Called by `images.py`, and by whoever needs the bytes.
"""

from __future__ import annotations

import binascii
import re
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

_BLANKS = "".join(map(chr, range(33)))
_HTTP_BLANKS = " \t\r\n"
_SCHEME = re.compile(r"d[\t\n\r]*a[\t\n\r]*t[\t\n\r]*a[\t\n\r]*:", re.IGNORECASE)
_BASE64 = re.compile(r"; *base64\Z", re.IGNORECASE)
_TYPE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+/[!#$%&'*+.^_`|~0-9A-Za-z-]+)[ \t\r\n]*(?:;|\Z)")
_REMOVED = str.maketrans("", "", "\t\n\r")
_ASCII_BLANKS = b" \t\n\x0c\r"


@dataclass(frozen=True, slots=True)
class DataUrl:
    """media_type: in lower case, "text/plain" when missing or malformed. body: still encoded."""

    media_type: str
    base64: bool
    body: str


def parse_data_url(url: str) -> DataUrl | None:
    """The parts of a data URL, or None when it is none."""
    url = url.strip(_BLANKS)
    scheme = _SCHEME.match(url)
    if scheme is None:
        return None
    head, comma, body = url[scheme.end() :].partition(",")
    if not comma or "#" in head:
        return None
    head = head.translate(_REMOVED).strip(_HTTP_BLANKS)
    base64 = _BASE64.search(head)
    if base64 is not None:
        head = head[: base64.start()]
    media_type = _TYPE.match(head.lower())
    return DataUrl(
        "text/plain" if media_type is None else media_type[1],
        base64 is not None,
        body.partition("#")[0],
    )


def data_url_bytes(parsed: DataUrl) -> bytes | None:
    """The bytes of a data URL, or None when its base64 is malformed."""
    data = parsed.body.encode()
    if b"%" in data:
        data = unquote_to_bytes(data.translate(None, b"\t\n\r"))
    if not parsed.base64:
        return data.translate(None, b"\t\n\r")
    data = data.translate(None, _ASCII_BLANKS)
    if len(data) % 4 == 0 and data.endswith(b"="):
        data = data[: -2 if data.endswith(b"==") else -1]
    if b"=" in data or len(data) % 4 == 1:
        return None
    try:
        return binascii.a2b_base64(data + b"=" * (-len(data) % 4), strict_mode=True)
    except binascii.Error:
        return None
