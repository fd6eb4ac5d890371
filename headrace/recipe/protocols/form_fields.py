"""Fields for the form of an answer that belong to another protocol, where they would do nothing.

Contract: a Responses or Messages request that has one of them is refused with its name and with
what that protocol has instead: an answer without the form that was asked for would be wrong. Level
`official` ignores them. Called by `responses.py` and `messages.py`.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from msgspec import Struct

from headrace.errors import InvalidRequest


class FormFields(Struct, kw_only=True):
    """The fields, for the wire types of both protocols."""

    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json_object: Any = None
    guided_whitespace_pattern: Any = None
    structured_outputs: Any = None
    response_format: Any = None


_NAMES = FormFields.__struct_fields__
_values = attrgetter(*_NAMES)
_NOTHING = (None,) * len(_NAMES)
# Values that ask for no form.
_HARMLESS = {"guided_json_object": False, "response_format": {"type": "text"}}


def refuse_form_fields(wire: FormFields, instead: str) -> None:
    """clients: form-fields. instead: the field of this protocol for a JSON schema."""
    values = _values(wire)
    if values == _NOTHING:
        return
    for name, value in zip(_NAMES, values, strict=True):
        if value is not None and (name not in _HARMLESS or value != _HARMLESS[name]):
            raise InvalidRequest(
                f"{name}: is a field of Chat Completions. Here {instead} asks for JSON of a "
                "schema; for other forms send the request to /v1/chat/completions.",
                param=name,
            )
