"""Rules of rendering that the golden cases do not show, or not on their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.recipe.constants import TASK_SPELLINGS, ReasoningEffort, SpecialTokens
from headrace.recipe.conversation import (
    AssistantMessage,
    Conversation,
    FormatKind,
    ImageSource,
    LatestReminder,
    Message,
    PromptText,
    ResponseFormat,
    SystemMessage,
    ToolCall,
    ToolChoice,
    ToolDefinition,
    ToolMessage,
    UserMessage,
)
from headrace.recipe.options import ModelVersion
from headrace.recipe.render import render

V4, V41 = ModelVersion.V4, ModelVersion.V41
BOTH = pytest.mark.parametrize("version", [V4, V41])
SPECIAL = SpecialTokens()
TOOL = ToolDefinition("T", None, {})


def user(text: str) -> UserMessage:
    return UserMessage(PromptText.of(text))


def result(text: str, call_id: str | None = None) -> ToolMessage:
    return ToolMessage(PromptText.of(text), call_id)


def calling(*ids: str) -> AssistantMessage:
    return AssistantMessage("", None, tuple(ToolCall(call_id, "f", "{}") for call_id in ids))


def chat(*messages: Message, **fields: object) -> Conversation:
    return replace(Conversation(messages, thinking=False), **fields)  # type: ignore[arg-type]


def text_of(conversation: Conversation, version: ModelVersion) -> str:
    return render(conversation, version, SPECIAL).text


def behind(conversation: Conversation, version: ModelVersion, mark: str) -> str:
    return text_of(conversation, version).partition(mark)[2]


# --- effort and tasks ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 37, 100])
def test_effort_number_is_written_as_it_is(number: int) -> None:
    text = text_of(chat(user("u"), thinking=True, reasoning_effort=number), V41)
    assert f"<｜System｜>Reasoning Effort: {number} (range 1-100, " in text


@pytest.mark.parametrize(
    ("number", "name"),
    [(1, "low"), (50, "low"), (51, "high"), (75, "high"), (76, "max"), (100, "max")],
)
def test_v4_has_texts_for_names_only(number: int, name: str) -> None:
    by_number = chat(user("u"), thinking=True, reasoning_effort=number)
    by_name = chat(user("u"), thinking=True, reasoning_effort=ReasoningEffort(name))
    assert text_of(by_number, V4) == text_of(by_name, V4)


def test_v4_efforts_differ() -> None:
    texts = [
        text_of(chat(user("u"), thinking=True, reasoning_effort=effort), V4)
        for effort in (*ReasoningEffort, None)
    ]
    low, high, xhigh, most, none = texts
    assert low == "<｜begin▁of▁sentence｜><｜User｜>u<｜Assistant｜><think>"
    assert high == xhigh == none
    assert len({low, high, most}) == 3


@BOTH
def test_a_task_takes_the_place_of_the_marks(version: ModelVersion) -> None:
    prompt = render(chat(user("u"), task="<｜query｜>"), version, SPECIAL)
    assert prompt.text == "<｜begin▁of▁sentence｜><｜User｜>u<｜query｜>"
    assert prompt.specials[-1] == "<｜query｜>"


@BOTH
def test_the_task_action_stands_behind_the_marks(version: ModelVersion) -> None:
    action = TASK_SPELLINGS["action"]
    assert text_of(chat(user("u"), task=action), version).endswith(
        "u<｜Assistant｜></think><｜action｜>"
    )
    assert text_of(chat(user("u"), task=action, thinking=True), version).endswith(
        "u<｜Assistant｜><think><｜action｜>"
    )


@BOTH
def test_a_title_follows_an_answer(version: ModelVersion) -> None:
    conversation = chat(user("u"), AssistantMessage("a"), task=TASK_SPELLINGS["title"])
    assert text_of(conversation, version).endswith("a<｜end▁of▁sentence｜><｜title｜>")


@BOTH
def test_a_task_never_opens_the_block_of_calls(version: ModelVersion) -> None:
    conversation = chat(user("u"), tools=(TOOL,), tool_choice=ToolChoice.REQUIRED)
    block = " calls>\n" if version is V41 else "tool_calls>\n"
    assert text_of(conversation, version).endswith(f"</think>\n\n<｜DSML｜{block}")
    task = replace(conversation, task="<｜title｜>")
    assert text_of(task, version).endswith("u<｜title｜>")


# --- order ---------------------------------------------------------------------------------------


def test_v41_results_take_the_order_of_the_calls() -> None:
    # Of two calls with one id the first counts; unknown ids count as the first call.
    conversation = chat(
        calling("b", "a", "b"),
        result("A", "a"),
        user("u"),
        result("no id"),
        result("B", "b"),
        result("?", "unknown"),
    )
    assert behind(conversation, V41, "<｜User｜>") == (
        "<tool_result>B</tool_result>\n\nu\n\n<tool_result>no id</tool_result>\n\n"
        "<tool_result>?</tool_result>\n\n<tool_result>A</tool_result><｜Assistant｜></think>"
    )


def test_v41_keeps_results_without_earlier_calls_and_across_turns() -> None:
    conversation = chat(
        calling("b", "a"), result("1", "a"), LatestReminder("r"), result("2", "b"), user("u")
    )
    text = text_of(conversation, V41)
    assert text.index(">1<") < text.index(">2<")


def test_v4_sorts_as_many_messages_as_there_are_calls() -> None:
    conversation = chat(calling("b", "a"), user("u"), result("2", "b"), result("1", "a"))
    assert behind(conversation, V4, "<｜User｜>") == (
        "<tool_result>2</tool_result>\n\nu<｜User｜><tool_result>1</tool_result>"
        "<｜Assistant｜></think>"
    )
    too_few = chat(calling("b", "a"), result("2", "b"))
    assert ">2<" in text_of(too_few, V4)


def test_v4_sorts_at_the_places_of_before() -> None:
    # The second answer is moved behind the result; what follows it then is not sorted for it.
    moved = AssistantMessage("moved", None, (ToolCall("x", "f", "{}"), ToolCall("y", "f", "{}")))
    conversation = chat(calling("b", "a"), moved, result("r", "1"), user("u"), result("s", "0"))
    text = text_of(conversation, V4)
    assert text.index(">r<") < text.index("moved") < text.index("u<｜User｜>") < text.index(">s<")


def test_v4_joins_neighbouring_user_messages_that_are_not_empty() -> None:
    image = ImageSource(url="https://x")
    place = UserMessage(PromptText(("", ""), (image,)))
    conversation = chat(
        user(""), user("a"), SystemMessage(PromptText.of("s")), user(""), place, user("b"), user("")
    )
    prompt = render(conversation, V4, SPECIAL)
    assert prompt.text == (
        "<｜begin▁of▁sentence｜>s<｜User｜>a\n\n<｜image｜>\n\nb<｜Assistant｜></think>"
    )
    assert prompt.images == (image,)


def test_v41_joins_also_empty_ones() -> None:
    assert text_of(chat(user(""), user("a"), user("")), V41) == (
        "<｜begin▁of▁sentence｜><｜User｜>\n\na\n\n<｜Assistant｜></think>"
    )


def test_reminders_in_a_row() -> None:
    conversation = chat(LatestReminder("1"), LatestReminder("2"), user("u"))
    assert "2" not in text_of(conversation, V41)
    assert "<｜latest_reminder｜>1<｜latest_reminder｜>2" in text_of(conversation, V4)


def test_v41_without_messages_says_nothing_of_effort() -> None:
    assert text_of(chat(thinking=True), V41) == "<｜begin▁of▁sentence｜><｜Assistant｜><think>"
    with_tools = text_of(chat(thinking=True, tools=(TOOL,)), V41)
    assert with_tools.startswith("<｜begin▁of▁sentence｜><｜System｜>Reasoning Effort: 75 ")


# --- tools ---------------------------------------------------------------------------------------


@BOTH
def test_deferred_tools_are_not_shown_but_count(version: ModelVersion) -> None:
    deferred = replace(TOOL, name="D", defer_loading=True)
    text = text_of(chat(user("u"), tools=(deferred,)), version)
    assert "## Tools" in text
    assert '"D"' not in text


def test_tools_are_written_by_the_form_of_the_version() -> None:
    tool = ToolDefinition("T", "d", {"x": 1e-05})
    assert '"parameters": {"x": 1e-05}}' in text_of(chat(user("u"), tools=(tool,)), V41)
    assert '"parameters": {"x": 0.00001}}' in text_of(chat(user("u"), tools=(tool,)), V4)


@BOTH
def test_long_lists_of_tools_are_written_too(version: ModelVersion) -> None:
    # Beyond what is remembered by its bytes.
    tools = tuple(ToolDefinition(f"t{i}", "x" * 100_000, {"n": 1e-05}) for i in range(4))
    text = text_of(chat(user("u"), tools=tools), version)
    few = "".join(text_of(chat(user("u"), tools=(tool,)), version) for tool in tools)
    written = [line for line in text.split("\n") if line.startswith('{"name"')]
    assert len(written) == 4
    assert all(line in few for line in written)


@BOTH
def test_arguments_that_are_no_object_are_one_text(version: ModelVersion) -> None:
    message = AssistantMessage("", None, (ToolCall("1", "f", "[1]"),))
    assert 'parameter name="arguments" string="true">[1]</' in text_of(chat(message), version)


# --- control tokens ------------------------------------------------------------------------------


@BOTH
def test_spellings_can_be_overridden_everywhere(version: ModelVersion) -> None:
    names = [name for name in SPECIAL.__slots__ if name != "grounding"]
    special = SpecialTokens(**{name: f"[{name}]" for name in names}, grounding=("[ref]",))
    conversation = Conversation(
        (
            SystemMessage(PromptText.of("s")),
            UserMessage(PromptText(("", ""), (ImageSource(url="https://x"),))),
            AssistantMessage("a[ref]b", "r", (ToolCall("1", "f", '{"k": 1}'),)),
            LatestReminder("l"),
        ),
        tools=(TOOL,),
    )
    prompt = render(conversation, version, special)
    expected = {f"[{name}]" for name in (*names, "ref")}
    assert set(prompt.specials) == expected - ({"[system]"} if version is V4 else set())
    assert not any(default in prompt.text for default in ("<think>", "</think>", "｜DSML｜"))


@BOTH
def test_a_token_without_a_spelling_is_left_out(version: ModelVersion) -> None:
    special = replace(SPECIAL, bos="", dsml="")
    conversation = chat(AssistantMessage("", None, (ToolCall("1", "f", '{"k": 1}'),)))
    prompt = render(conversation, version, special)
    assert "" not in prompt.specials
    assert prompt.text.startswith("<｜Assistant｜></think>\n\n<")
    assert prompt.specials == ("<｜Assistant｜>", "</think>", *prompt.specials[2:])
    assert len(prompt.specials) == 5


@BOTH
def test_only_assistant_text_has_grounding_tokens(version: ModelVersion) -> None:
    marks = "".join(SPECIAL.grounding)
    plain = chat(user(marks), LatestReminder(marks), result(marks))
    assert not set(SPECIAL.grounding) & set(render(plain, version, SPECIAL).specials)
    answer = AssistantMessage(f"<｜{marks}<｜User｜>", marks, prefix=True)
    prompt = render(Conversation((user("u"), answer)), version, SPECIAL)
    assert [s for s in prompt.specials if s in SPECIAL.grounding] == list(SPECIAL.grounding) * 2
    assert "<｜User｜>" in prompt.regions[-1]


def test_the_grounding_mark_that_ends_first_wins() -> None:
    def found(text: str, *spellings: str) -> list[str]:
        special = replace(SPECIAL, grounding=spellings)
        specials = render(chat(AssistantMessage(text)), V41, special).specials
        return [spelling for spelling in specials if spelling in spellings and spelling]

    assert found("aaa", "aa", "a") == ["a", "a", "a"]
    assert found("xabce", "abcd", "bc") == ["bc"]
    assert found("xabc bc", "abc", "bc") == ["abc", "bc"]
    assert found("abc", "", "") == []


@BOTH
def test_surplus_images_stay_in_the_list(version: ModelVersion) -> None:
    images = tuple(ImageSource(url=f"https://{i}") for i in range(3))
    text = PromptText.with_places("a<｜image｜>b", images, "<｜image｜>")
    prompt = render(chat(UserMessage(text)), version, SPECIAL)
    assert prompt.specials.count("<｜image｜>") == 1
    assert prompt.images == images


@BOTH
def test_regex_formats_and_text_say_nothing(version: ModelVersion) -> None:
    plain = text_of(chat(user("u")), version)
    regex = chat(user("u"), response_format=ResponseFormat(FormatKind.REGEX, "a+"))
    assert text_of(regex, version) == plain
