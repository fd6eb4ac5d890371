"""Encode cases of the token codec: a request or conversation -> every stage up to the ids.

`check_encode` compares all that a case expects and says for each stage whether it is equal; the
rules are those of the issue: conversion errors byte for byte (of texts that a schema validator
writes, the leading text), other errors by stage and status. Called by `check/recipe.py`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.check.recipe_cases import Difference, first_difference, same_ids, same_text
from headrace.errors import HeadraceError, InvalidBody, InvalidRequest
from headrace.recipe.constants import SpecialTokens
from headrace.recipe.conversation import Conversation
from headrace.recipe.conversation_input import conversation_from_json
from headrace.recipe.conversation_json import (
    conversation_to_json,
    image_to_json,
    inference_to_json,
    parsing_to_json,
)
from headrace.recipe.converted import ConvertedRequest, ParsingOptions, Protocol, ThinkingStage
from headrace.recipe.options import (
    MODEL_VERSIONS,
    ConvertOptions,
    Level,
    MissingReasoning,
    ModelVersion,
    WebSearch,
)
from headrace.recipe.protocols.convert import convert
from headrace.recipe.protocols.errors_wire import error_body
from headrace.recipe.protocols.sampling import resolve_max_tokens
from headrace.recipe.render import render
from headrace.recipe.render.prompt import RenderedPrompt
from headrace.recipe.tokenizer import Tokenizer

_VERSIONS = {"DeepseekV41Flash": ModelVersion.V41, "DeepseekV4Pro": ModelVersion.V4}
# After these words comes what a schema validator says, unless it is one of our own sentences.
_VALIDATOR = re.compile(
    r"(Invalid schema for function '[^']*': (?!schema must be a JSON Schema of)"
    r"|Invalid tool parameters schema : (?!one of )|Invalid json schema: (?!one of ))"
)
# Names of the official special tokens that belong to the grounding marks, in their order.
_GROUNDING = ("ref", "ref_end", "box", "box_end", "point", "point_end", "polygon", "polygon_end")

Stage = tuple[str, Difference | None]


def options_of(case: Mapping[str, Any]) -> ConvertOptions:
    """The conversion options of a case, at level `official`."""
    given = case.get("options") or {}
    aliases = {name: _VERSIONS[v] for name, v in given.get("model_aliases", {}).items()}
    fields: dict[str, Any] = {
        "default_thinking_mode": given.get("default_thinking_mode"),
        "thinking_max_tokens_bound": given.get("thinking_max_tokens_upper_bound"),
        "non_thinking_max_tokens_bound": given.get("non_thinking_max_tokens_upper_bound"),
    }
    if "reasoning_content_behavior" in given:
        name = given["reasoning_content_behavior"]
        fields["missing_reasoning"] = (
            MissingReasoning.REJECT if name == "Reject" else MissingReasoning.FILL_EMPTY
        )
    for key in ("responses_web_search", "messages_web_search"):
        if key in given:
            fields[key] = WebSearch(given[key].lower())
    return ConvertOptions(
        level=Level.OFFICIAL,
        model_versions={**MODEL_VERSIONS, **aliases},
        special=special_of(given.get("special_tokens", {})),
        **{key: value for key, value in fields.items() if value is not None},
    )


def special_of(spellings: Mapping[str, str]) -> SpecialTokens:
    """The control tokens with other spellings, by their official names."""
    special = SpecialTokens()
    marks = list(special.grounding)
    fields = dict(spellings)
    for name in [name for name in fields if name in _GROUNDING]:
        marks[_GROUNDING.index(name)] = fields.pop(name)
    return dataclasses.replace(special, grounding=tuple(marks), **fields)


def body_of(case: Mapping[str, Any]) -> bytes:
    """The request body of a case as JSON text."""
    raw = case.get("request_raw")
    text = raw if raw is not None else json.dumps(case["request"])
    return str(text).encode("utf-8", "surrogatepass")


def converted_of(case: Mapping[str, Any], options: ConvertOptions) -> ConvertedRequest:
    """The converted request of a case; raises what the conversion raises."""
    return convert(case["protocol"], body_of(case), options)


def parsing_from_json(given: Mapping[str, Any]) -> ParsingOptions:
    """Explicit parsing options of a decode case; absent keys have the official defaults."""
    stage = given.get("thinking_initial_stage")
    return ParsingOptions(
        parse_tool_calls=given.get("parse_tool_calls", True),
        starts_in_tool_calls=given.get("starts_in_tool_calls", False),
        parse_json=given.get("parse_json_output", False),
        thinking_stage=None if stage is None else ThinkingStage(stage),
        stops=tuple(given.get("stop_sequences", ())),
    )


def check_encode(case: Mapping[str, Any], tokenizer: Tokenizer) -> Iterator[Stage]:
    """(stage, None or its first difference) of all that the case expects."""
    compare = _Comparer(case["id"])
    options = options_of(case)
    converted: ConvertedRequest | None = None
    try:
        if case["protocol"] == "conversation":
            conversation = conversation_from_json(case["conversation"])
            version, special = ModelVersion(case["encoding"]), _image_spelling(case)
        else:
            converted = converted_of(case, options)
            conversation, version = converted.conversation, converted.version
            special = options.special
    except (InvalidRequest, ValueError) as error:
        yield compare.error(case.get("expect_error"), error)
        return
    if "expect_error" in case:
        yield compare.equal("error", case["expect_error"], "accepted")
        return
    if converted is not None:
        yield from _request_stages(case, converted, special, compare)
    yield compare.equal("version", case["encoding"], str(version))
    prompt = render(conversation, version, special)
    yield from _prompt_stages(case, prompt, tokenizer, compare)


def _image_spelling(case: Mapping[str, Any]) -> SpecialTokens:
    """A conversation built by hand may name another image token."""
    tokens = {m.get("image_token") for m in case["conversation"]["messages"]} - {None}
    return SpecialTokens(image=tokens.pop()) if tokens else SpecialTokens()


def _request_stages(
    case: Mapping[str, Any],
    converted: ConvertedRequest,
    special: SpecialTokens,
    compare: _Comparer,
) -> Iterator[Stage]:
    conversation = converted.conversation
    shown = conversation_to_json(conversation, special.image)
    yield compare.equal("conversation", case["expect_conversation"], shown)
    yield compare.equal(
        "inference", case["expect_inference"], inference_to_json(converted.inference)
    )
    yield compare.equal("parsing", case["expect_parsing"], parsing_to_json(converted.parsing))
    yield compare.equal("stream", case["expect_stream"], converted.stream)
    if "expect_namespace_tool_map" in case:
        declared = converted.settings.declared_namespace_tools
        names = {name: list(pair) for name, pair in declared.items()}
        yield compare.equal("namespaces", case["expect_namespace_tool_map"], names)
    for probe in case.get("expect_max_tokens", ()):
        got = _max_tokens(conversation, converted.inference.max_tokens, probe)
        yield compare.equal("max_tokens", probe, got)


def _max_tokens(
    conversation: Conversation, requested: int | None, probe: Mapping[str, Any]
) -> dict[str, Any]:
    given = {key: probe[key] for key in ("prompt_tokens", "context_limit")}
    try:
        limits = probe["prompt_tokens"], probe["context_limit"]
        return {**given, "max_tokens": resolve_max_tokens(conversation, requested, *limits)}
    except InvalidRequest as error:
        return {**given, "status_code": error.http_status, "message": error.message}


def _prompt_stages(
    case: Mapping[str, Any], prompt: RenderedPrompt, tokenizer: Tokenizer, compare: _Comparer
) -> Iterator[Stage]:
    expected = case["expect_prompt"]
    same = same_text(prompt.text, expected)
    if isinstance(expected, dict) and not same:
        expected = (
            expected["head"]
            if prompt.text[: len(expected["head"])] != expected["head"]
            else expected
        )
    yield compare.known("prompt", same, expected, prompt.text)
    ranges: Any = [list(pair) for pair in prompt.special_ranges()]
    if isinstance(case["expect_special_ranges"], int):
        ranges = len(ranges)
    yield compare.equal("ranges", case["expect_special_ranges"], ranges)
    yield compare.equal("images", case["expect_images"], [image_to_json(i) for i in prompt.images])
    try:
        ids = tokenizer.encode_prompt(prompt)
    except HeadraceError as error:
        wanted = case.get("expect_token_ids_error", "ids")
        yield compare.equal("ids", wanted, error.message)
        return
    if "expect_token_ids_error" in case:
        yield compare.equal("ids", case["expect_token_ids_error"], ids)
        return
    wanted = case["expect_token_ids"]
    yield compare.known("ids", same_ids(ids, wanted), wanted, ids)


class _Comparer:
    """Makes the stages of one case."""

    def __init__(self, case: str) -> None:
        self._case = case

    def equal(self, stage: str, expected: Any, got: Any) -> Stage:
        """A stage of which both sides are JSON values."""
        found = first_difference(expected, got)
        return stage, None if found is None else Difference(self._case, stage, *found)

    def known(self, stage: str, same: bool, expected: Any, got: Any) -> Stage:
        """A stage that was compared already."""
        if same:
            return stage, None
        found = first_difference(expected, got) or ("", expected, got)
        return stage, Difference(self._case, stage, *found)

    def error(self, expected: Any, error: Exception) -> Stage:
        """The stage `error`: which one was raised, at which status, with which text."""
        if expected is None:
            return self.equal("error", "accepted", f"{type(error).__name__}: {error}")
        if isinstance(error, InvalidBody):
            return self.equal("error", expected["stage"], "deserialize")
        if not isinstance(error, HeadraceError):
            wanted = {key: expected.get(key) for key in ("stage", "message")}
            return self.equal("error", wanted, {"stage": "construct", "message": str(error)})
        # The official body is the same for all protocols.
        status, body = error_body(error, Protocol.CHAT, Level.OFFICIAL)
        got: dict[str, Any] = {"stage": "convert", "status_code": status, "body": body}
        wanted = {key: expected.get(key) for key in got}
        message = (wanted["body"] or {}).get("error", {}).get("message", "")
        found = _VALIDATOR.match(message)
        if found is not None and error.message.startswith(found[0]):
            got["body"] = wanted["body"]
        return self.equal("error", wanted, got)
