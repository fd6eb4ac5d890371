"""Typed access to the long literal texts of the prompt formats.

The texts are data, not code: `data/prompt_constants.json` is a copy of the published constants
(licence in NOTICE), byte for byte what the models were trained with. Read once, on first use, by
the renderers and, for placeholders and the patch tool, by the protocols.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from headrace.recipe.constants import ReasoningEffort
from headrace.recipe.conversation import ToolDefinition
from headrace.recipe.options import ModelVersion


@dataclass(frozen=True, slots=True)
class PromptTexts:
    """Texts of one prompt format.

    tools_before, tools_after: around the tool schemas; the control tokens in the first one have
    their default spellings. json_object: the request for any JSON object. json_schema: what stands
    in front of a response schema. efforts: how each effort is asked for. apply_patch: the function
    that stands for the custom tool of this name.
    """

    tools_before: str
    tools_after: str
    json_object: str
    json_schema: str
    efforts: Mapping[ReasoningEffort, str]
    apply_patch: ToolDefinition


@dataclass(frozen=True, slots=True)
class Literals:
    """Texts that conversions put in the place of what they cannot pass on, and two error texts."""

    unsupported_image: str
    unsupported_document: str
    unsupported_image_error: str
    unsupported_file_error: str
    system_reminder: str
    unsupported_document_type: str

    def reminder(self, content: str) -> str:
        """A system text in the middle of a V4 conversation, for a user message."""
        return self.system_reminder.replace("{content}", content, 1)

    def document(self, media_type: str | None) -> str:
        """The placeholder of a document in a Messages request."""
        return self.unsupported_document_type.replace(
            "{media_type|unknown}", media_type or "unknown"
        )


@cache
def prompt_texts(version: ModelVersion) -> PromptTexts:
    """The texts of a prompt format."""
    texts = _data()[version.value]
    tool = texts["apply_patch_tool"]
    return PromptTexts(
        tools_before=texts["tool_prompt_before_schemas"],
        tools_after=texts["tool_prompt_after_schemas"],
        json_object=texts["json_object_block"],
        json_schema=texts["json_schema_block"].removesuffix("{SCHEMA}"),
        efforts={effort: texts["reasoning_effort_text"][effort] for effort in ReasoningEffort},
        apply_patch=ToolDefinition(tool["name"], tool["description"], tool["parameters"]),
    )


@cache
def literals() -> Literals:
    """The texts that do not depend on the prompt format."""
    texts = _data()["literals"]
    return Literals(
        unsupported_image=texts["unsupported_image"],
        unsupported_document=texts["unsupported_document_responses"],
        unsupported_image_error=texts["unsupported_image_error"],
        unsupported_file_error=texts["unsupported_file_error"],
        system_reminder=texts["system_reminder_wrap_v4"],
        unsupported_document_type=texts["unsupported_document_messages"],
    )


@cache
def _data() -> dict[str, Any]:
    path = files("headrace.recipe") / "data" / "prompt_constants.json"
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content
