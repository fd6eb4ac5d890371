"""Texts of JSON kinds as values, with the bounds that keep every library safe.

Contract: `schema_of` and `choices_of` raise InvalidGrammar for what is not JSON of the right form
or too deep; what the values mean is the backend's business. Used by the backends.
"""

from __future__ import annotations

import json
from typing import Any

from headrace.core.grammar import GrammarKind
from headrace.errors import InvalidGrammar

MAX_CHOICES = 10_000


def schema_of(kind: GrammarKind, text: str, max_depth: int) -> dict[str, Any]:
    """The schema of a json_schema or json_object grammar, as a new dict.

    max_depth: of nested arrays and objects; the libraries recurse and would end the process.
    """
    if kind is GrammarKind.JSON_OBJECT:
        return {"type": "object"}
    schema = _parsed(text)
    if schema is False:
        raise InvalidGrammar("The JSON schema is false: no answer fits it.", param="grammar")
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidGrammar(
            f"A JSON schema must be an object, true or false, got {type(schema).__name__}.",
            param="grammar",
        )
    if _deeper_than(schema, max_depth):
        raise InvalidGrammar(
            f"The JSON schema is nested deeper than {max_depth} levels.", param="grammar"
        )
    return schema


def choices_of(text: str) -> list[str]:
    """The strings of a choice grammar, at least one."""
    choices = _parsed(text)
    if (
        not isinstance(choices, list)
        or not 1 <= len(choices) <= MAX_CHOICES
        or not all(isinstance(choice, str) for choice in choices)
    ):
        raise InvalidGrammar(
            f"A choice grammar must be a JSON array of 1 to {MAX_CHOICES} strings.",
            param="grammar",
        )
    return choices


def _parsed(text: str) -> Any:
    try:
        value = json.loads(text)
        # Numbers such as 1e999 and lone surrogates are no JSON for the libraries.
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except RecursionError:
        raise InvalidGrammar("The JSON text is nested too deep.", param="grammar") from None
    except UnicodeEncodeError:
        raise InvalidGrammar(
            "The grammar holds a lone surrogate, which is not a character.", param="grammar"
        ) from None
    except ValueError as error:
        raise InvalidGrammar(f"The grammar is not valid JSON: {error}.", param="grammar") from None
    return value


def _deeper_than(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True
