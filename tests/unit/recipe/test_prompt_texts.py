"""The literal texts are those of the published constants, in the right places."""

from __future__ import annotations

import json

import pytest

from headrace.recipe.constants import SpecialTokens
from headrace.recipe.conversation import (
    Conversation,
    FormatKind,
    PromptText,
    ResponseFormat,
    ToolDefinition,
    UserMessage,
)
from headrace.recipe.options import ModelVersion
from headrace.recipe.prompt_texts import literals, prompt_texts
from headrace.recipe.render import render
from tests.unit.recipe.golden import GOLDEN

CONSTANTS = json.loads((GOLDEN / "prompt_constants.json").read_text("utf-8"))


@pytest.mark.parametrize("version", ModelVersion)
def test_whole_system_text(version: ModelVersion) -> None:
    conversation = Conversation(
        (UserMessage(PromptText.of("u")),),
        thinking=False,
        tools=(ToolDefinition("T", None, {}),),
        response_format=ResponseFormat(FormatKind.JSON_OBJECT),
    )
    text = render(conversation, version, SpecialTokens()).text
    expected = CONSTANTS[version]["tools_plus_json_object_full_system"]
    assert text == f"<｜begin▁of▁sentence｜>{expected}<｜User｜>u<｜Assistant｜></think>"


@pytest.mark.parametrize("version", ModelVersion)
def test_patch_tool(version: ModelVersion) -> None:
    tool = prompt_texts(version).apply_patch
    expected = CONSTANTS[version]["apply_patch_tool"]
    assert (tool.name, tool.description, tool.parameters) == tuple(expected.values())


def test_literals() -> None:
    texts = literals()
    assert texts.reminder("a {content}") == "<system-reminder>\na {content}\n</system-reminder>"
    assert texts.document("text/plain") == "[Unsupported document type: text/plain]"
    assert texts.document(None) == "[Unsupported document type: unknown]"
    assert texts.unsupported_document == "[Unsupported Document]"
    assert texts.unsupported_image == CONSTANTS["literals"]["unsupported_image"]
    assert texts.unsupported_image_error == CONSTANTS["literals"]["unsupported_image_error"]
    assert texts.unsupported_file_error == CONSTANTS["literals"]["unsupported_file_error"]
