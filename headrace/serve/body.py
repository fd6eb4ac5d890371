"""Reading a request body within limits of size and time.

Contract: `read_body` returns the bytes or raises BodyTooLarge (413), InvalidRequest (400, too slow
or not JSON by its content type) or Cancelled (the client went away). It never holds more than the
limit, whatever Content-Length says or leaves out.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import Receive

from headrace.errors import BodyTooLarge, Cancelled, InvalidRequest


async def read_body(
    headers: Headers, receive: Receive, *, max_bytes: int, timeout_s: float
) -> bytes:
    """The whole body."""
    _check_encoding(headers)
    declared = headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Cancelled("The client went away while it sent the body.")
                part = message.get("body", b"")
                size += len(part)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise InvalidRequest(f"The request body did not arrive within {timeout_s:g} s.") from None


def _check_encoding(headers: Headers) -> None:
    """Refuse bodies that are not plain JSON in UTF-8 by their own headers."""
    content_type, _, parameters = headers.get("content-type", "").lower().partition(";")
    content_type = content_type.strip()
    if content_type not in ("application/json", "") and not content_type.endswith("+json"):
        raise InvalidRequest(f"Content-Type must be application/json, got {content_type[:100]!r}.")
    for parameter in parameters.split(";"):
        name, _, value = (part.strip().strip('"') for part in parameter.partition("="))
        if name == "charset" and value not in ("utf-8", "utf8", "us-ascii"):
            raise InvalidRequest(
                f"The body must be in UTF-8, Content-Type says charset {value[:100]!r}."
            )
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise InvalidRequest(
            f"The body must be sent without compression, got Content-Encoding {encoding[:100]!r}."
        )


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than the limit of {max_bytes} bytes.")
