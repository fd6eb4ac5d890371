"""One entry to the conversions of all protocols, for callers that do not know theirs beforehand.

Contract: the same as `convert_chat`, `convert_responses` and `convert_messages`; only the modules
of the protocol in question are loaded. Used by the command line, the case checker and benchmarks.
"""

from __future__ import annotations

from headrace.recipe.converted import ConvertedRequest, Protocol
from headrace.recipe.options import ConvertOptions


def convert(protocol: Protocol | str, body: bytes, options: ConvertOptions) -> ConvertedRequest:
    """The converted request. Raises InvalidBody, InvalidRequest; ValueError: no such protocol."""
    match Protocol(protocol):
        case Protocol.CHAT:
            from headrace.recipe.protocols.chat import convert_chat

            return convert_chat(body, options)
        case Protocol.RESPONSES:
            from headrace.recipe.protocols.responses import convert_responses

            return convert_responses(body, options)
        case Protocol.MESSAGES:
            from headrace.recipe.protocols.messages import convert_messages

            return convert_messages(body, options)
