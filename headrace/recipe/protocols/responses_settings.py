"""What the events of the Responses protocol echo or need of the request.

Made by `convert_responses`, read by the events and complete responses of Responses. The echoed
values are those that the request asked for, not what sampling uses (spec recipe 11.2), in the form
in which the response object shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def _no_reasoning() -> Mapping[str, Any]:
    return {"effort": None, "summary": None}


def _plain_text() -> Mapping[str, Any]:
    return {"format": {"type": "text"}, "verbosity": None}


@dataclass(frozen=True, slots=True)
class ResponsesSettings:
    """Echoed values, and how names of called functions become items.

    temperature, top_p: as requested (the shortest digits of the f32), 1.0 when absent. tools: in
    the order of the request, without types that the codec does not know.
    namespace_tools: registered function name -> (namespace, local name), of declared and of found
    tools; a called name that is not in it has no namespace. declared_names: those of its names that
    `tools` declares.
    custom_tools: registered names whose calls are `custom_tool_call` items with a raw `input`.
    tool_search: a call of `tool_search` is a `tool_search_call` item.
    store, previous_response_id, metadata, parallel_tool_calls, truncation: level `clients`; at
    level `official` they keep their fixed values. input_items: the items to store with the answer
    as JSON texts (history first), None when it is not to be stored. wants_encrypted_reasoning:
    whether `include` asks for it.
    """

    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_logprobs: int = 0
    user: str | None = None
    reasoning: Mapping[str, Any] = field(default_factory=_no_reasoning)
    text: Mapping[str, Any] = field(default_factory=_plain_text)
    tool_choice: Any = "auto"
    tools: tuple[Mapping[str, Any], ...] = ()
    namespace_tools: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    declared_names: frozenset[str] = frozenset()
    custom_tools: frozenset[str] = frozenset()
    tool_search: bool = False
    store: bool = False
    previous_response_id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    parallel_tool_calls: bool = True
    truncation: str = "disabled"
    input_items: tuple[bytes, ...] | None = None
    wants_encrypted_reasoning: bool = False

    @property
    def declared_namespace_tools(self) -> dict[str, tuple[str, str]]:
        """`namespace_tools` of the declared tools alone."""
        return {
            name: pair for name, pair in self.namespace_tools.items() if name in self.declared_names
        }
