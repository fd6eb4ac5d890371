"""Images and documents of Messages requests, and how errors quote text.

Contract: a source block becomes an `ImageSource` or InvalidRequest with the text of the official
codec; nothing is fetched or decoded into pixels. Called by `messages_blocks.py`.
"""

from __future__ import annotations

import base64
import binascii
import unicodedata

from headrace.errors import InvalidRequest
from headrace.recipe.conversation import ImageSource
from headrace.recipe.protocols.images import MAX_URL_BYTES, image_from_url, is_http
from headrace.recipe.protocols.messages_wire import Base64Source, FileSource, UrlSource

_FILE_ID = "file_id is not supported. Pass the image as a base64 data url instead."
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\0"}
# Combining characters outside of the categories Mn and Me (Unicode property Grapheme_Extend).
_OTHER_COMBINING = frozenset(
    "\u09be\u09d7\u0b3e\u0b57\u0bbe\u0bd7\u0cc0\u0cc2\u0cc7\u0cc8\u0cca\u0ccb\u0cd5\u0cd6\u0d3e"
    "\u0d57\u0dcf\u0ddf\u1715\u1734\u1b35\u1b3b\u1b3d\u1b43\u1b44\u1baa\u1bf2\u1bf3\u302e\u302f"
    "\ua953\ua9c0\uff9e\uff9f\U000111c0\U00011235\U0001133e\U0001134d\U00011357\U000114b0"
    "\U000114bd\U000115af\U000116b6\U00011930\U0001193d\U00016ff0\U00016ff1\U0001d165"
    "\U0001d166\U0001d16d\U0001d16e\U0001d16f\U0001d170\U0001d171\U0001d172"
)


def image_source(
    source: Base64Source | UrlSource | FileSource, *, path: str, where: str, official: bool
) -> ImageSource:
    """Source of an image. path: what later errors about it name; where: what errors here name."""
    if isinstance(source, Base64Source):
        kind = "image/jpeg" if source.media_type == "image/jpg" else source.media_type
        data = _checked_base64(source.data, where)
        return ImageSource(data_url=f"data:{kind};base64,{data}", path=path)
    if isinstance(source, FileSource):
        raise InvalidRequest(f"{where}: {_FILE_ID}", param=where)
    url = source.url
    if not is_http(url):
        if not official and url.startswith("data:"):
            # clients: data-url-source. Gateways put the data URLs of other protocols here.
            return image_from_url(url, None, path=path)
        raise InvalidRequest(f"{where}: invalid url: {quoted(url)}", param=where)
    length = len(url.encode())
    if length > MAX_URL_BYTES:
        raise InvalidRequest(
            f"{where}: external link length {length} too long, max link length {MAX_URL_BYTES}. "
            "Consider passing file data directly with base64 data url instead.",
            param=where,
        )
    return ImageSource(url=url, path=path)


def quoted(text: str) -> str:
    """Text in double quotes, escaped as the official codec writes it (Rust's debug form)."""
    escapes = {ord(character): _escaped(character) for character in set(text)}
    return f'"{text.translate(escapes)}"'


def _escaped(character: str) -> str:
    known = _ESCAPES.get(character)
    if known is not None:
        return known
    combining = character in _OTHER_COMBINING or unicodedata.category(character) in ("Mn", "Me")
    if character.isprintable() and not combining:
        return character
    return f"\\u{{{ord(character):x}}}"


def _checked_base64(data: str, where: str) -> str:
    """Base64 text with its padding completed where there is any; InvalidRequest when it is none."""
    if data.endswith("="):
        data = data.rstrip("=")
        data += "=" * (-len(data) % 4)
    try:
        binascii.a2b_base64(data, strict_mode=True)
        # Bits that belong to no byte have to be zero.
        canonical = base64.b64encode(base64.b64decode(data[-4:])) == data[-4:].encode()
    except ValueError:
        canonical = False
    if not canonical:
        raise InvalidRequest(f"{where}: base64 decode error", param=where)
    return data
