"""Tokens that an image takes in a V4.1 prompt, and the size that it is resized to (spec 11.6).

Contract: pure arithmetic on width and height in pixels; `fitted_size` is a fixed point, so counting
the resized image gives the same number. Raises ImageSizeError when none is reached. Used by
`preprocess.py`, and by whoever counts a prompt.
"""

from __future__ import annotations

import math

from headrace.errors import InvalidRequest

PATCH = 14
DOWNSAMPLE = 3
CELL = PATCH * DOWNSAMPLE
MAX_TOKENS = 1024
MIN_AREA = 544 * 544
# Tokens around the cells, besides the one that ends every row.
_FRAME = 2
_MAX_ROUNDS = 10
LOW_DETAIL_SIDE = 512
# A WebP file holds no longer side.
WEBP_SIDE = 16_383
_LONGEST_SIDE = WEBP_SIDE // PATCH * PATCH
_MAX_WEBP_ROUNDS = 6


class ImageSizeError(InvalidRequest):
    """No size fits: shrinking and aligning never came to rest."""


def token_count(width: int, height: int) -> int:
    """Tokens of an image of this size in the prompt, its one placeholder included."""
    return _tokens_at(*fitted_size(width, height))


def prepared_size(width: int, height: int, *, low_detail: bool = False) -> tuple[int, int]:
    """Width and height after `preprocess`: fitted, and short enough for a WebP file."""
    size = fitted_size(*(shrunk_to_low(width, height) if low_detail else (width, height)))
    for _ in range(_MAX_WEBP_ROUNDS):
        longest = max(size)
        if longest <= WEBP_SIDE:
            return size
        scale = _LONGEST_SIDE / longest
        width, height = (max(PATCH, _aligned(int(side * scale))) for side in size)
        size = fitted_size(min(width, _LONGEST_SIDE), min(height, _LONGEST_SIDE))
    raise ImageSizeError(f"An image of {width} x {height} pixels is too long and narrow.")


def shrunk_to_low(width: int, height: int) -> tuple[int, int]:
    """Size of an image whose details do not matter: the long side is at most 512."""
    longest = max(width, height)
    if longest <= LOW_DETAIL_SIDE:
        return width, height
    scale = LOW_DETAIL_SIDE / longest
    return max(1, int(width * scale + 0.5)), max(1, int(height * scale + 0.5))


def fitted_size(width: int, height: int) -> tuple[int, int]:
    """Width and height of the image as the model sees it: multiples of 14 within the budget."""
    size = (width, height)
    for _ in range(_MAX_ROUNDS):
        fitted = fit_once(*size)
        if fitted == size:
            return size
        size = fitted
    raise ImageSizeError(f"The size of an image of {width} x {height} pixels does not converge.")


def _tokens_at(width: int, height: int) -> int:
    rows, columns = (-(-(side // PATCH) // DOWNSAMPLE) for side in (height, width))
    return rows * (columns + 1) + _FRAME


def _aligned(side: int) -> int:
    return -(-side // PATCH) * PATCH


def fit_once(width: int, height: int) -> tuple[int, int]:
    """One step of `fitted_size`."""
    area = width * height
    if 0 < area < MIN_AREA:
        ratio = math.sqrt(MIN_AREA / area)
        width, height = int(width * ratio), int(height * ratio)
    aligned = (_aligned(width), _aligned(height))
    if _tokens_at(*aligned) <= MAX_TOKENS:
        return aligned
    return _shrunk(width, height)


def _shrunk(width: int, height: int) -> tuple[int, int]:
    """The largest size of about the same shape whose cells fit the budget."""
    budget = MAX_TOKENS - _FRAME
    if not width:
        return CELL, budget // 2 * CELL
    ratio = height / width
    columns = math.sqrt(budget / ratio + 0.25) - 0.5
    rows = columns * ratio
    if columns < 1:
        return CELL, budget // 2 * CELL
    if rows < 1:
        return (budget - 1) * CELL, CELL
    scale = min(int(columns) * CELL / width, int(rows) * CELL / height)
    return int(width * scale / PATCH) * PATCH, int(height * scale / PATCH) * PATCH
