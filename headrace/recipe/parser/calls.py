"""Writes calls of level `clients`: name, then the pieces of one JSON object of arguments.

Contract: once a call is closed, its arguments are valid JSON with unique keys, whatever was given.
Strings, objects and arrays are streamed; other values are short and wait for their end, since only
then it is certain that they are valid. Used by `lenient.py`.
"""

from __future__ import annotations

import json
import re

from headrace.recipe.json_text import escaped
from headrace.recipe.parser.items import CallArguments, CallBegin, CallNamed, Item
from headrace.recipe.parser.json_repair import (
    JsonRepair,
    bare_value,
    is_json,
    is_json_object,
    quoted,
)

# Text in a call that was meant as arguments, not as prose.
_LOOKS_LIKE_DATA = re.compile(r"[=:{}\[\]<>]")


class CallWriter:
    """The calls of one answer. calls: how many got a name.

    marker: never appears in arguments that are found in a body. muted: nothing is written.

    `items` is the list that items are appended to; whoever reads it replaces it.
    """

    def __init__(self, marker: str, muted: bool) -> None:
        self._marker = marker
        self.items: list[Item] = []
        self.calls = 0
        self.in_call = False
        self.in_value = False
        self._muted = muted
        self._names: set[str] = set()
        self._body: list[str] = []
        self._dropped = False  # the parameter has a name that came before
        self._string: bool | None = None  # None: it is not said whether the value is a string
        self._held: list[str] = []  # a value that waits for its end
        self._repair: JsonRepair | None = None

    @property
    def streams_string(self) -> bool:
        """Whether the value is a string, which is written as it comes."""
        return self.in_value and self._string is True and not self._dropped and not self._muted

    def begin(self, name: str) -> None:
        """A call begins; one that is open ends."""
        self.close()
        self.in_call = True
        self._names.clear()
        self._body.clear()
        if not self._muted:
            self.calls += 1
            self.items += (CallBegin(), CallNamed(name))

    def body(self, text: str) -> None:
        """Text in a call, outside of its parameters."""
        self._body.append(text)

    def open_parameter(self, name: str, string: bool | None) -> None:
        """A parameter begins; one that is open ends."""
        self.close_parameter()
        self.in_value = True
        # clients: duplicate-parameter. The first counts.
        self._dropped = name in self._names
        self._string = string
        if not self._dropped:
            start = ", " if self._names else "{"
            self._write(start + quoted(name) + (': "' if string else ": "))
            self._names.add(name)

    def value(self, text: str) -> None:
        """A piece of the value of the parameter."""
        if self._dropped:
            return
        if self._string:
            self._write(escaped(text))
        elif self._repair is not None:
            self._write(self._repair.push(text))
        else:
            self._held.append(text)
            if self._string is False and not text.isspace():
                self._begin_value()

    def _begin_value(self) -> None:
        """Decide whether the value can be streamed, at its first piece that is not white space."""
        if len(self._held) > 1 and not self._held[0].isspace():
            return
        start = "".join(self._held)
        if start.lstrip()[:1] in ("{", "["):
            # clients: bare-value. Objects and arrays are repaired while they are streamed.
            self._held.clear()
            self._repair = JsonRepair()
            self._write(self._repair.push(start))
        else:
            self._held[:] = [start]

    def close_parameter(self) -> None:
        """The parameter ends."""
        if not self.in_value:
            return
        self.in_value = False
        if not self._dropped:
            self._write(self._value_end())
        self._held.clear()
        self._repair = None

    def _value_end(self) -> str:
        if self._string:
            return '"'
        if self._repair is not None:
            return self._repair.close()
        text = "".join(self._held)
        if self._string is False:
            # clients: bare-value. What is no JSON becomes a JSON string.
            return bare_value(text)
        # clients: missing-string-attribute. JSON is taken as such, all else is a string.
        return text if is_json(text) else quoted(text)

    def close(self) -> None:
        """The call ends: its arguments are completed."""
        if not self.in_call:
            return
        self.close_parameter()
        self.in_call = False
        if self._names:
            self._write("}")
            return
        body = "".join(self._body).replace(self._marker, "").strip()
        if is_json_object(body):
            # clients: arguments-object
            self._write(body)
        elif _LOOKS_LIKE_DATA.search(body):
            self._write(json.dumps({"arguments": body}, ensure_ascii=False))
        else:
            self._write("{}")

    def _write(self, text: str) -> None:
        if text and not self._muted:
            self.items.append(CallArguments(text))
