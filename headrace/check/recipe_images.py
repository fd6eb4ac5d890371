"""Image cases of the token codec: tokens of a size, and what preprocessing makes of a picture.

Called by `check/recipe.py`. The picture of a preprocessing case is drawn here; only its size
counts.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from headrace.recipe.conversation import ImageDetail, ImageSource
from headrace.recipe.images.source import ImageError
from headrace.recipe.images.tokens import token_count


def image_result(case: Mapping[str, Any]) -> tuple[str, Any, Any]:
    """(stage, what the case expects, what was got)."""
    if "preprocess" not in case:
        return "tokens", case["tokens"], token_count(case["width"], case["height"])
    expected = case.get("out") or {k: case[k] for k in ("error_kind", "message", "is_retryable")}
    return "preprocess", expected, _preprocessed(case)


def _preprocessed(case: Mapping[str, Any]) -> Any:
    from PIL import Image

    from headrace.recipe.images.preprocess import prepare_images

    file = io.BytesIO()
    Image.new("RGB", tuple(case["preprocess"]), (200, 30, 30)).save(file, "PNG")
    source = ImageSource(data=file.getvalue(), detail=ImageDetail(case["detail"]))
    try:
        (image,) = prepare_images([source])
    except ImageError as error:
        # A failure that may go away is the server's (500); all others are the request's.
        return {
            "error_kind": error.kind,
            "message": error.message,
            "is_retryable": error.http_status >= 500,
        }
    return [image.width, image.height]
