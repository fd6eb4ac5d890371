"""Calling one of 1 to 5 offered tools with typed arguments, then answering from its result."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from typing import Any

from headrace.eval import words
from headrace.eval.families.fields import Field, draw_fields
from headrace.eval.items import Check, Draw, Item, Reply, Sample, answer_of, framed, says, user
from headrace.recipe.conversation import (
    AssistantMessage,
    Conversation,
    Message,
    PromptText,
    ToolCall,
    ToolDefinition,
    ToolMessage,
)

# verb of the name -> how people ask for it.
_VERBS = {
    "get": ("Get", "Show me", "Tell me", "I want to see", "What is"),
    "find": ("Find", "Search for", "Look for", "Look up"),
    "book": ("Book", "Reserve", "Please book", "I need"),
    "create": ("Create", "Make", "Set up", "Add"),
    "delete": ("Delete", "Remove", "Get rid of"),
    "update": ("Update", "Change", "Edit"),
    "send": ("Send", "Please send", "Deliver"),
    "cancel": ("Cancel", "Call off", "Please cancel"),
    "start": ("Start", "Begin", "Turn on", "Launch"),
    "stop": ("Stop", "End", "Turn off", "Halt"),
    "check": ("Check", "Verify", "Have a look at"),
    "order": ("Order", "Buy", "Please order"),
}
_NOUNS = words.listing(
    """weather forecast flight train hotel table ticket taxi meeting appointment reminder alarm
    timer note task event invoice payment account order parcel letter email message call song
    playlist
    film photo video book recipe article route map shop product price stock report file folder
    backup heating light door window camera lamp oven fan car bike garden pool class course exam
    lesson job contract member visitor patient customer supplier delivery package subscription
    password key card team project server sensor machine robot game match"""
)
_ASKS = (
    "{ask} {article}{noun} {details}.",
    "{ask} {article}{noun} {details}, please.",
    "Can you help? {ask} {article}{noun} {details}.",
    "Please do this: {ask} {article}{noun} {details}.",
    "{ask} {article}{noun} {details}",
    "{ask} {article}{noun} {details}?",
)
_RESULTS: dict[str, Any] = {
    "id": words.code,
    "price": lambda rng: rng.randrange(10, 5000) / 10,
    "temperature": lambda rng: rng.randrange(-20, 41),
    "sky": lambda rng: rng.choice(("clear", "cloudy", "rainy", "foggy")),
    "count": lambda rng: rng.randrange(0, 200),
    "owner": words.full_name,
    "place": words.city,
    "date": words.date,
    "time": words.clock,
    "colour": lambda rng: rng.choice(words.COLOURS),
    "state": lambda rng: rng.choice(("open", "closed", "pending", "ready", "late")),
    "title": words.phrase,
    "level": lambda rng: rng.randrange(0, 101),
}
_ERRORS = ("not found", "no access", "timeout", "out of stock", "fully booked", "invalid date")
_SMALL_TALK = (
    ("Hello", "Hello! How can I help you?"),
    ("Hi there!", "Hello! How can I help you?"),
    ("Thank you", "You are welcome."),
    ("Thanks a lot!", "You are welcome."),
    ("Good morning", "Good morning! How can I help you?"),
    ("Bye", "Goodbye!"),
)


@dataclass(frozen=True, slots=True)
class _Tool:
    verb: str
    noun: str
    definition: ToolDefinition
    fields: tuple[Field, ...]
    required: int  # the first ones are


def draw(rng: random.Random, options: Draw) -> Sample:
    """1 to 3 requests with the same tools: each a call, its result and the answer to it."""
    tools = _tools(rng, rng.randrange(1, 6))
    definitions = tuple(tool.definition for tool in tools)
    frame = framed(rng, (), thinking=options.thinking, tools=definitions)
    messages: tuple[Message, ...] = frame.messages
    items: list[Item] = []
    for turn in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.08:
            question, text = rng.choice(_SMALL_TALK)
            messages = (*messages, user(question))
            answer = answer_of(text, "No tool is needed.", options)
            items.append(_item("no call", frame, messages, answer, says(text)))
            messages = (*messages, answer)
            continue
        request, calls, thought = _request(rng, tools, turn)
        messages = (*messages, user(request))
        answer = AssistantMessage("", thought if options.thinking else None, calls)
        items.append(_item("call", frame, messages, answer, _calls_check(calls)))
        messages = (*messages, answer)
        texts = []
        for call in calls:
            result, text = _result(rng)
            texts.append(text)
            messages = (*messages, ToolMessage(PromptText.of(result), call.id))
        text = " ".join(texts)
        answer = answer_of(text, "The result is here.", options)
        items.append(_item("answer", frame, messages, answer, says(text)))
        messages = (*messages, answer)
    return tuple(items)


def _item(
    part: str,
    frame: Conversation,
    messages: tuple[Message, ...],
    answer: AssistantMessage,
    check: Check,
) -> Item:
    conversation = replace(frame, messages=messages)
    return Item("tools", part, conversation, answer, check)


def _tools(rng: random.Random, count: int) -> list[_Tool]:
    """Different tools; those of one noun differ in the verb and the other way round."""
    names: list[tuple[str, str]] = []
    while len(names) < count:
        verb, noun = rng.choice(tuple(_VERBS)), rng.choice(_NOUNS)
        if names and rng.random() < 0.3:
            verb, noun = rng.choice(((names[0][0], noun), (verb, names[0][1])))
        elif rng.random() < 0.1:
            noun = words.made_up(rng)
        if (verb, noun) not in names:
            names.append((verb, noun))
    style = rng.randrange(4)
    described = rng.random() < 0.6
    return [_tool(rng, verb, noun, style, described) for verb, noun in names]


def _tool(rng: random.Random, verb: str, noun: str, style: int, described: bool) -> _Tool:
    if style == 0:
        name = f"{verb}{noun.capitalize()}"
    elif style == 1:
        name = f"{noun}_{verb}"
    else:
        name = f"{verb}_{noun}"
    fields = draw_fields(rng, rng.randrange(1, 5) if rng.random() < 0.95 else 0)
    required = rng.randrange(1, len(fields) + 1) if fields else 0
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {field.name: field.schema(described=described) for field in fields},
    }
    if rng.random() < 0.85:
        parameters["required"] = [field.name for field in fields[:required]]
    article = "" if noun.endswith("s") else "an " if noun[0] in "aeiou" else "a "
    description = f"{verb.capitalize()} {article}{noun}"
    definition = ToolDefinition(name, description + rng.choice(("", ".", ".")), parameters)
    return _Tool(verb, noun, definition, tuple(fields), required)


def _request(
    rng: random.Random, tools: list[_Tool], turn: int
) -> tuple[str, tuple[ToolCall, ...], str]:
    """A request for one tool, sometimes for two; the calls; the thought before them."""
    chosen = rng.sample(tools, 2 if len(tools) > 1 and rng.random() < 0.08 else 1)
    texts, calls, thoughts = [], [], []
    for number, tool in enumerate(chosen):
        given = [
            (field, field.draw(rng))
            for place, field in enumerate(tool.fields)
            if place < tool.required or rng.random() < 0.4
        ]
        mentions = [field.mention(rng, value) for field, value in given]
        rng.shuffle(mentions)
        article = rng.choice(("the ", "a ")) if not tool.noun.endswith("s") else "the "
        text = rng.choice(_ASKS).format(
            ask=rng.choice(_VERBS[tool.verb]),
            article=article,
            noun=tool.noun,
            details=rng.choice((" ", ", ")).join(mentions),
        )
        # Without details a space is left over.
        texts.append(text.replace(" .", ".").replace(" ,", ",").replace(" ?", "?").rstrip())
        arguments = {field.name: value for field, value in given}
        name = tool.definition.name
        call_id = f"call_{turn}_{number}"
        calls.append(ToolCall(call_id, name, json.dumps(arguments, ensure_ascii=False)))
        shown = ", ".join(f"{key} {json.dumps(value)}" for key, value in arguments.items())
        thoughts.append(f"Use {name}: {shown}." if shown else f"Use {name}.")
    return " ".join(texts), tuple(calls), " ".join(thoughts)


def _result(rng: random.Random) -> tuple[str, str]:
    """What a tool returned, as JSON, and the sentence that tells it."""
    kind = rng.random()
    if kind < 0.1:
        error = rng.choice(_ERRORS)
        return json.dumps({"error": error}), f"Sorry, that did not work: {error}."
    if kind < 0.2:
        return rng.choice(('{"status": "ok"}', "ok", '{"ok": true}')), "Done."
    names = rng.sample(tuple(_RESULTS), rng.randrange(1, 4))
    values = {name: _RESULTS[name](rng) for name in names}
    parts = [f"the {name} is {value}" for name, value in values.items()]
    text = words.listed(parts)
    return json.dumps(values, ensure_ascii=False), f"{text[0].upper()}{text[1:]}."


def _calls_check(calls: tuple[ToolCall, ...]) -> Check:
    """The same calls in the same order; arguments equal in value and type."""
    expected = [(call.name, json.loads(call.arguments)) for call in calls]

    def check(reply: Reply) -> bool:
        return len(reply.calls) == len(expected) and all(
            name == right and _same(arguments, values)
            for (name, arguments), (right, values) in zip(reply.calls, expected, strict=True)
        )

    return check


def _same(given: Any, expected: Any) -> bool:
    """Equal JSON values; true is not 1, but 3.0 is 3."""
    if isinstance(expected, dict):
        return (
            isinstance(given, dict)
            and given.keys() == expected.keys()
            and all(_same(given[key], value) for key, value in expected.items())
        )
    if isinstance(expected, bool) or isinstance(given, bool):
        return given is expected
    return bool(given == expected)
