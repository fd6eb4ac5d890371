"""What the events of Chat Completions need to know of their request.

Made by `protocols/chat.py`, read by `events/` when chunks and responses are written.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """include_usage: of `stream_options`.

    parallel_tool_calls: False when the client wants at most one call in an answer. custom_tools:
    names that were declared as custom tools: their calls are answered as `custom` ones, whose
    input is the string `input` of the arguments. legacy_functions: the request used `functions`;
    its client reads `function_call` instead of `tool_calls`. All but the first are of level
    `clients`.
    """

    include_usage: bool = False
    parallel_tool_calls: bool = True
    custom_tools: frozenset[str] = frozenset()
    legacy_functions: bool = False
