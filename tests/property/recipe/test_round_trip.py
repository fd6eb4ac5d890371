"""What the model wrote, sent back by a client, gives the same prompt again: five turns, no drift.

Each turn the true answer is rendered, its ids are fed to the answer stream in random groups, the
complete response is turned into the client's next message, and the prompt of the next request must
be the one that the true answer gives, and say the same. In the three protocols, both prompt formats
and both levels.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.recipe.chunks import Finish, Tokens
from headrace.recipe.conversation import (
    AssistantMessage,
    Message,
    PromptText,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from headrace.recipe.options import ConvertOptions, Level
from headrace.recipe.protocols.convert import convert
from headrace.recipe.render import render
from headrace.recipe.stream import AnswerStream
from tests.unit.recipe import golden

MODELS = ("DeepSeek-V4.1-Flash", "DeepSeek-V4-Pro")
SCHEMA = {"type": "object", "properties": {"a": {}, "b": {}}}
NAMES = ("f", "get_weather")

letters = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="｜<"), max_size=40)
pieces = st.sampled_from(
    ["é", "👩‍🚀", "a < b", "<b>", "\n\n", "  ", "```json\n{}\n```", "{", "<think>", "\\", '"']
)
texts = st.lists(letters | pieces, max_size=4).map("".join)
inner = texts.map(lambda text: text.strip("\n"))
keys = st.text("abcXYZ_09-é中", min_size=1, max_size=8)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
values = st.recursive(
    scalars,
    lambda kids: st.lists(kids, max_size=3) | st.dictionaries(keys, kids, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(keys, values, max_size=4)
calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments), max_size=3)
answers = st.tuples(inner, inner, calls, texts).map(
    # An answer without calls has content: an empty message cannot be sent back.
    lambda answer: answer if answer[1] or answer[2] else (answer[0], "ok", *answer[2:])
)
turns = st.lists(answers, min_size=5, max_size=5)


class Client:
    """A client of one protocol: its history grows by responses and by its own turns."""

    def __init__(self, protocol: str, model: str, first: str) -> None:
        self.protocol = protocol
        self.model = model
        self.history: list[Any] = [{"role": "user", "content": first}]

    def body(self) -> bytes:
        request: dict[str, Any] = {"model": self.model}
        if self.protocol == "chat":
            tools: list[Any] = [
                {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
                for name in NAMES
            ]
            request |= {"messages": self.history, "tools": tools}
        elif self.protocol == "responses":
            tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]
            request |= {"input": self.history, "tools": tools}
        else:
            tools = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
            request |= {"messages": self.history, "tools": tools, "max_tokens": 99}
        return json.dumps(request).encode()

    def take(self, response: dict[str, Any], reply: str) -> None:
        """Add the response, results of its calls, and the user's reply."""
        if self.protocol == "chat":
            message = response["choices"][0]["message"]
            self.history.append(message)
            for number, call in enumerate(message.get("tool_calls") or ()):
                result = {"role": "tool", "tool_call_id": call["id"], "content": f"result {number}"}
                self.history.append(result)
            self.history.append({"role": "user", "content": reply})
        elif self.protocol == "responses":
            self.history += response["output"]
            ids = [
                item["call_id"] for item in response["output"] if item["type"] == "function_call"
            ]
            for number, call_id in enumerate(ids):
                result = {
                    "type": "function_call_output",
                    "call_id": call_id,
                    "output": f"result {number}",
                }
                self.history.append(result)
            self.history.append({"role": "user", "content": reply})
        else:
            self.history.append({"role": "assistant", "content": response["content"]})
            used = [block["id"] for block in response["content"] if block["type"] == "tool_use"]
            results: list[Any] = [
                {"type": "tool_result", "tool_use_id": used_id, "content": f"result {number}"}
                for number, used_id in enumerate(used)
            ]
            self.history.append(
                {"role": "user", "content": [*results, {"type": "text", "text": reply}]}
            )


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(first=texts, answered=turns, seed=st.integers(0, 10**6))
def test_an_answer_sent_back_renders_as_it_was_written(
    protocol: str, model: str, level: Level, first: str, answered: list[Any], seed: int
) -> None:
    tokenizer = golden.real_tokenizer()
    rng = random.Random(seed)
    options = ConvertOptions(level=level)
    client = Client(protocol, model, first)
    truth: tuple[Message, ...] = (UserMessage(PromptText.of(first)),)
    for reasoning, content, made, reply in answered:
        converted = convert(protocol, client.body(), options)
        assert converted.conversation.thinking
        answer = AssistantMessage(
            content,
            reasoning,
            tuple(
                ToolCall(f"call_{n:02}", name, json.dumps(given, ensure_ascii=False))
                for n, (name, given) in enumerate(made)
            )
            or None,
        )
        asked = dataclasses.replace(converted.conversation, messages=truth)
        prompt = tokenizer.encode_prompt(render(asked, converted.version, options.special))
        shown = render(converted.conversation, converted.version, options.special)
        assert tokenizer.encode_prompt(shown) == prompt
        truth = (*truth, answer)
        asked = dataclasses.replace(converted.conversation, messages=truth)
        whole = tokenizer.encode_prompt(render(asked, converted.version, options.special))
        assert whole[: len(prompt)] == prompt
        written = whole[len(prompt) :]
        written = written[: written.index(tokenizer.added[options.special.eos])]
        client.take(_response(converted, options, written, rng), reply)
        results = tuple(
            ToolMessage(PromptText.of(f"result {n}"), f"call_{n:02}") for n in range(len(made))
        )
        truth = (*truth, *results, UserMessage(PromptText.of(reply)))
    converted = convert(protocol, client.body(), options)
    asked = dataclasses.replace(converted.conversation, messages=truth)
    assert render(converted.conversation, converted.version, options.special) == render(
        asked, converted.version, options.special
    )
    assert meaning(converted.conversation.messages) == meaning(truth)


def meaning(messages: Sequence[Message]) -> list[Any]:
    """What the answers say; a prompt alone would not show what both sides lose."""
    return [
        (
            message.content,
            message.reasoning_content,
            [(call.name, json.loads(call.arguments)) for call in message.tool_calls or ()],
        )
        for message in messages
        if isinstance(message, AssistantMessage)
    ]


def _response(converted: Any, options: ConvertOptions, ids: list[int], rng: random.Random) -> Any:
    stream = AnswerStream(
        converted,
        response_id="r",
        model=converted.model,
        special=options.special,
        tokenizer=golden.real_tokenizer(),
        silent=True,
    )
    start = 0
    while start < len(ids):
        size = rng.randrange(1, 8)
        stream.push(Tokens(ids[start : start + size]))
        start += size
    stream.push(Finish())
    return json.loads(stream.response())
