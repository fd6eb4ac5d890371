"""Conversation -> prompt, one module per prompt format.

Contract: `render` is pure and byte-identical to the official codec for every conversation that
codec can hold. Called by the codec facade, the command line and the case checker.
"""

from __future__ import annotations

from headrace.recipe.constants import SpecialTokens
from headrace.recipe.conversation import Conversation
from headrace.recipe.options import ModelVersion
from headrace.recipe.render import v4, v41
from headrace.recipe.render.prompt import RenderedPrompt

__all__ = ["CALL_FORMATS", "RenderedPrompt", "render"]

CALL_FORMATS = {ModelVersion.V4: v4.CALLS, ModelVersion.V41: v41.CALLS}


def render(
    conversation: Conversation, version: ModelVersion, special: SpecialTokens
) -> RenderedPrompt:
    """The prompt that asks for the next answer (or goes on with a prefix message)."""
    if version is ModelVersion.V41:
        return v41.render(conversation, special)
    return v4.render(conversation, special)
