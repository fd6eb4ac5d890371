"""What an engine of today cannot do for a request that the codec understands.

Contract: whatever promises something that nobody here keeps is refused by name, before any work is
done: an answer that silently ignores what was asked is worse than an error. Rows leave this module
as features arrive. Used by the routes and by `generate`.
"""

from __future__ import annotations

from headrace.errors import InvalidRequest
from headrace.recipe.conversation import PromptText
from headrace.recipe.converted import ConvertedRequest


def check_supported(request: ConvertedRequest) -> None:
    """Raise InvalidRequest for images."""
    for message in request.conversation.messages:
        content = message.content
        if isinstance(content, PromptText) and content.images:
            # Paths begin with a dot where texts of the official codec do.
            path = content.images[0].path.lstrip(".") or "image"
            raise InvalidRequest(f"{path}: this server does not support images yet.", param=path)
