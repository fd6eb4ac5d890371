"""What an engine of today cannot do for a request that the codec understands.

Contract: whatever promises something that nobody here keeps is refused by name, before any work is
done: an answer that silently ignores what was asked is worse than an error. What merely describes
(tools under `auto`) passes. Rows leave this module as features arrive. Used by the routes and by
`generate`.
"""

from __future__ import annotations

from headrace.errors import InvalidRequest
from headrace.recipe.conversation import FormatKind, PromptText, ToolChoice
from headrace.recipe.converted import ConstraintKind, ConvertedRequest, Protocol

_NO_GRAMMAR = "this server does not support constrained output yet"
_FORMAT_FIELDS = {
    Protocol.CHAT: "response_format",
    Protocol.RESPONSES: "text.format",
    Protocol.MESSAGES: "output_config.format",
}


def check_supported(request: ConvertedRequest) -> None:
    """Raise InvalidRequest for images, and for what needs a grammar."""
    constraint = request.inference.constraint
    conversation = request.conversation
    kind = None if constraint is None else constraint.kind
    if kind is ConstraintKind.TOOL_CALL_REQUIRED:
        raise InvalidRequest(f"tool_choice: {_NO_GRAMMAR}; use auto or none.", param="tool_choice")
    if conversation.tool_choice is not ToolChoice.NONE:
        for tool in conversation.tools:
            if tool.strict:
                raise InvalidRequest(
                    f'tools: {_NO_GRAMMAR}, so the tool "{tool.name}" cannot be strict.',
                    param="tools",
                )
    formatted = kind in (ConstraintKind.JSON, ConstraintKind.REGEX)
    # Beside tools the constraint is that of the tools.
    if formatted or conversation.response_format.kind is not FormatKind.TEXT or _asks_json(request):
        field = _FORMAT_FIELDS[request.protocol]
        raise InvalidRequest(f"{field}: {_NO_GRAMMAR}.", param=field)
    for message in conversation.messages:
        content = message.content
        if isinstance(content, PromptText) and content.images:
            raise InvalidRequest(
                "this server does not support images yet.", param=content.images[0].path or "image"
            )


def _asks_json(request: ConvertedRequest) -> bool:
    return request.protocol is Protocol.MESSAGES and bool(request.settings.asks_format)
