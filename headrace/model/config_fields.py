"""Typed access to the fields of a decoded JSON object, with errors that name the field.

A missing key and an explicit null are the same thing. Every accessor raises ModelConfigError with
the dotted name and nothing else, whatever the value is. Used by `spec_parse`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from headrace.errors import ModelConfigError

# No size in a config can honestly be larger: widths and lengths, then rows of tables.
MAX_SIZE = 2**20
MAX_INTEGER = 2**40
MAX_LIST = 65_536
SHOWN_CHARACTERS = 80


def shown(value: object) -> str:
    """A bounded text of an arbitrary value for an error message."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_INTEGER:
        return "a number beyond 2^40"
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


class Fields:
    """One JSON object; `prefix` ("text_config.") comes before names in errors."""

    __slots__ = ("prefix", "values")

    def __init__(self, values: Mapping[str, object], prefix: str) -> None:
        self.values = values
        self.prefix = prefix

    def error(self, name: str, problem: str) -> ModelConfigError:
        """The error to raise about field `name`."""
        full = self.prefix + name
        return ModelConfigError(f"config.json: {full}: {problem}.", param=full)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def _get(self, name: str) -> object:
        if not self.has(name):
            raise self.error(name, "is missing")
        return self.values[name]

    def section(self, name: str) -> Fields:
        """A nested object."""
        value = self._get(name)
        if not isinstance(value, Mapping):
            raise self.error(name, f"must be an object, got {shown(value)}")
        return Fields(value, f"{self.prefix}{name}.")

    def fixed(
        self,
        name: str,
        expected: object,
        *,
        alias: str | None = None,
        required: bool = False,
    ) -> None:
        """Check a field of which one value is supported; absent passes unless `required`."""
        name = alias if alias is not None and not self.has(name) and self.has(alias) else name
        if not self.has(name) and not required:
            return
        value = self._get(name)
        if type(value) is not type(expected) or value != expected:
            raise self.error(name, f"must be {expected!r}, {shown(value)} is not supported")

    def _integer(self, name: str, value: object, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"must be an integer, got {shown(value)}")
        if not low <= value <= high:
            raise self.error(name, f"must be in [{low}, {high}], got {shown(value)}")
        return value

    def integer(
        self, name: str, *, low: int = 1, high: int = MAX_SIZE, default: int | None = None
    ) -> int:
        """An integer in [low, high]; missing without `default` is an error."""
        if default is not None and not self.has(name):
            return default
        return self._integer(name, self._get(name), low, high)

    def integers(
        self, name: str, *, low: int = 1, default: tuple[int, ...] | None = None
    ) -> tuple[int, ...]:
        """A list of integers >= low."""
        if default is not None and not self.has(name):
            return default
        value = self._get(name)
        if not isinstance(value, (list, tuple)) or len(value) > MAX_LIST:
            raise self.error(name, f"must be a list of integers, got {shown(value)}")
        return tuple(self._integer(name, item, low, MAX_INTEGER) for item in value)

    def layer_ids(
        self, name: str, num_layers: int, *, default: tuple[int, ...] | None = None
    ) -> tuple[int, ...]:
        """A strictly ascending list of layer numbers below `num_layers`."""
        layers = self.integers(name, low=0, default=default)
        if any(a >= b for a, b in itertools.pairwise(layers)):
            raise self.error(name, f"must be strictly ascending, got {shown(list(layers))}")
        if layers and layers[-1] >= num_layers:
            raise self.error(name, f"names layer {layers[-1]}, the model has {num_layers}")
        return layers

    def number(self, name: str) -> float:
        """A finite number above 0."""
        return self._number(name, self._get(name))

    def numbers(self, name: str, count: int, *, default: float) -> tuple[float, ...]:
        """A list of `count` finite numbers above 0; all `default` where it is missing."""
        if not self.has(name):
            return (default,) * count
        value = self._get(name)
        if not isinstance(value, (list, tuple)) or len(value) != count:
            raise self.error(name, f"must be a list of {count} numbers, got {shown(value)}")
        return tuple(self._number(name, item) for item in value)

    def _number(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(name, f"must be a number, got {shown(value)}")
        number = float(value) if abs(value) <= 1e300 else math.inf
        if not math.isfinite(number) or number <= 0.0:
            raise self.error(name, f"must be finite and above 0, got {shown(value)}")
        return number

    def boolean(self, name: str, *, default: bool | None = None) -> bool:
        """true or false."""
        if default is not None and not self.has(name):
            return default
        value = self._get(name)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, got {shown(value)}")
        return value

    def string(self, name: str) -> str:
        """A text."""
        value = self._get(name)
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, got {shown(value)}")
        return value

    def strings(self, name: str, *, default: tuple[str, ...]) -> tuple[str, ...]:
        """A list of texts."""
        if not self.has(name):
            return default
        value = self._get(name)
        if not isinstance(value, (list, tuple)) or not all(isinstance(x, str) for x in value):
            raise self.error(name, f"must be a list of strings, got {shown(value)}")
        return tuple(value)
