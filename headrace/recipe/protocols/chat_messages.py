"""Messages of Chat Completions -> messages of the conversation.

Contract: order, text and images are kept; calls and their results must be complete; every error
has the text of the official codec. Level `clients` also reads the roles `developer` and `function`
and calls of custom tools. Called by `chat.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from headrace.errors import InvalidBody, InvalidRequest
from headrace.recipe.conversation import (
    AssistantMessage,
    ImageSource,
    LatestReminder,
    Message,
    PromptText,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from headrace.recipe.json_text import compact_json, spaced_json
from headrace.recipe.options import ConvertOptions, MissingReasoning, ModelVersion
from headrace.recipe.protocols.attribution import BILLING_HEADER, cut_header, strip_attribution
from headrace.recipe.protocols.chat_wire import (
    AssistantEntry,
    ClientAssistantEntry,
    ClientFilePart,
    ClientFunctionCall,
    ClientHistoryCall,
    ClientImagePart,
    ClientReminderEntry,
    ClientToolEntry,
    ClientUserEntry,
    CustomCall,
    FileFields,
    FilePart,
    FunctionEntry,
    HistoryCall,
    ImagePart,
    ImageUrl,
    InputImagePart,
    InputTextPart,
    OutputTextPart,
    RefusalPart,
    ReminderEntry,
    TextPart,
    ToolEntry,
    UserEntry,
)
from headrace.recipe.protocols.images import (
    IMAGE_PLACEHOLDER,
    check_file_data,
    check_link,
    image_from_url,
    join_parts,
)
from headrace.recipe.protocols.json_body import convert_value

# Members of an enumeration are slow to look up before Python 3.12.
_V41 = ModelVersion.V41
_FILL_EMPTY = MissingReasoning.FILL_EMPTY
_UNANSWERED = (
    "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
    "'tool_call_id'"
)
_TEXT_PARTS = (TextPart, InputTextPart, OutputTextPart)
_IMAGE_PARTS = (ImagePart, ClientImagePart, InputImagePart, FilePart)


@dataclass(frozen=True, slots=True)
class _Reader:
    """What the conversion of one request's messages depends on."""

    images: bool
    official: bool
    strip: bool
    thinking: bool
    fill_reasoning: bool

    def text(self, content: Any, number: int) -> PromptText:
        """Content of any message but an assistant's."""
        if content.__class__ is str:
            return PromptText((content,))
        if content is None:
            return PromptText()
        if self.images:
            self.check_sources(content, number)
        return join_parts([self.part(part, number) for part in content])

    def check_sources(self, content: Sequence[Any], number: int) -> None:
        """The official codec looks at files and lengths of links before it takes any image."""
        path = f".messages[{number}]"
        for place, part in enumerate(content):
            if isinstance(part, FilePart):
                check_file_data(_file_data(part, number), path=path)
            elif isinstance(part, _IMAGE_PARTS):
                check_link(_image_url(part)[0], path=f"{path}.image_url.url[{place}]")

    def part(self, part: Any, number: int) -> str | ImageSource:
        """A part of a list of contents whose sources are checked already."""
        if isinstance(part, _TEXT_PARTS):
            return part.text
        if isinstance(part, RefusalPart):
            return part.refusal
        if not self.images:
            return IMAGE_PLACEHOLDER
        path = f".messages[{number}]"
        if isinstance(part, FilePart):
            return image_from_url(_file_data(part, number), None, path=path)
        url, detail = _image_url(part)
        return image_from_url(url, detail, path=path)

    def system(self, content: Any, number: int) -> SystemMessage | None:
        """A system message, or None when nothing is left of it."""
        text = self.text(content, number)
        first = text.parts[0]
        if first.startswith(BILLING_HEADER):
            text = replace(text, parts=(cut_header(first), *text.parts[1:]))
        if self.strip:
            text = replace(text, parts=tuple(map(strip_attribution, text.parts)))
        return None if text.parts == ("",) else SystemMessage(text)

    def assistant_text(self, content: Any, number: int) -> str:
        """Content of an assistant message, which has no images."""
        if content.__class__ is str:
            return content
        if content is None:
            return ""
        if self.images:
            self.check_sources(content, number)
            for place, part in enumerate(content):
                if isinstance(part, _IMAGE_PARTS):
                    raise InvalidRequest(
                        "Image in assistant message is not supported",
                        param=f"messages[{number}].content[{place}]",
                    )
        return join_parts([self.part(part, number) for part in content]).parts[0]

    def assistant(
        self, entry: AssistantEntry | ClientAssistantEntry, number: int
    ) -> AssistantMessage:
        """An assistant message; its reasoning fits the mode unless that is to be checked."""
        reasoning = entry.reasoning_content
        content = entry.content
        if isinstance(entry, ClientAssistantEntry):
            if reasoning is None and isinstance(entry.reasoning, str):
                reasoning = entry.reasoning  # clients: reasoning-alias
            if content is None and not entry.tool_calls and isinstance(entry.refusal, str):
                content = entry.refusal  # clients: refusals
            elif content is None and reasoning is not None:
                content = ""  # clients: null-content
        text = self.assistant_text(content, number)
        calls = None
        if entry.tool_calls is not None:
            calls = _calls(entry.tool_calls, number, self.official)
        if content is None and calls is None:
            raise InvalidRequest(
                "Invalid assistant message: content or tool_calls must be set",
                param=f"messages[{number}]",
            )
        if not self.thinking:
            reasoning = None
        elif reasoning is None and self.fill_reasoning:
            reasoning = ""
        return AssistantMessage(text, reasoning, calls, bool(entry.prefix))


_reader = lru_cache(maxsize=32)(_Reader)


def read_messages(
    entries: list[Any], *, version: ModelVersion, thinking: bool, options: ConvertOptions
) -> list[Message]:
    """The messages; with MissingReasoning.REJECT the reasoning is left to `settle_reasoning`."""
    reader = _reader(
        version is _V41,
        options.official,
        options.strip_attribution,
        thinking,
        options.missing_reasoning is _FILL_EMPTY,
    )
    messages: list[Message] = []
    # Calls of the last assistant message: id -> whether its result is still to come.
    waiting: dict[str, bool] = {}
    missing = 0
    for number, entry in enumerate(entries):
        kind = entry.__class__
        if kind is ToolEntry or kind is ClientToolEntry:
            _answer(waiting, missing, entry.tool_call_id, number)
            missing -= 1
            messages.append(ToolMessage(reader.text(entry.content, number), entry.tool_call_id))
            continue
        if missing:
            raise _unanswered(number)
        if kind is AssistantEntry or kind is ClientAssistantEntry:
            if kind is ClientAssistantEntry and entry.function_call:
                _modernise(entries, number)
            message = reader.assistant(entry, number)
            if message.tool_calls:
                waiting = dict.fromkeys([call.id for call in message.tool_calls], True)
                missing = len(message.tool_calls)
            messages.append(message)
        elif kind is UserEntry or kind is ClientUserEntry:
            messages.append(UserMessage(reader.text(entry.content, number)))
        elif kind is ReminderEntry or kind is ClientReminderEntry:
            messages.append(LatestReminder(_reminder(reader, entry.content, number)))
        elif kind is FunctionEntry:
            raise _orphan(number)
        else:
            system = reader.system(entry.content, number)
            if system is not None:
                messages.append(system)
    if missing:
        raise _unanswered(len(entries))
    return messages


# --- parts -----------------------------------------------------------------------------------


def _image_url(part: Any) -> tuple[str, str | None]:
    url = part.image_url
    if isinstance(url, ImageUrl):
        return url.url, url.detail
    # clients: part-forms
    return url, getattr(part, "detail", None)


def _file_data(part: FilePart, number: int) -> str:
    file_id, data, filename = part.file_id, part.file_data, part.filename
    if isinstance(part, ClientFilePart) and part.file and file_id is None and data is None:
        fields = convert_value(part.file, FileFields, f"messages[{number}].file")
        file_id, data, filename = fields.file_id, fields.file_data, fields.filename
    problem = None
    if file_id is None and data is None:
        problem = "file must have a file_id or file_data"
    elif file_id is not None and data is not None:
        problem = "file cannot have both file_id and file_data"
    elif file_id is not None:
        problem = (
            "file_id is not supported. Pass the image as a base64 data url instead."
            if filename is None
            else "file cannot have filename when file_id is present"
        )
    if problem is not None or data is None:
        raise InvalidRequest(f".messages[{number}]: {problem}", param=f"messages[{number}]")
    return data


def _reminder(reader: _Reader, content: Any, number: int) -> str:
    text = reader.text(content, number)
    if text.images:
        raise InvalidBody(
            "invalid request body: a latest_reminder holds text only",
            param=f"messages[{number}].content",
        )
    return text.parts[0]


# --- calls -----------------------------------------------------------------------------------


def _calls(
    entries: Sequence[HistoryCall | ClientHistoryCall], number: int, official: bool
) -> tuple[ToolCall, ...] | None:
    if not entries:
        if not official:
            return None  # clients: empty-tool-calls
        raise InvalidRequest(
            f"Invalid 'messages[{number}].tool_calls': empty array. Expected an array with minimum "
            "length 1, but got an empty array instead.",
            param=f"messages[{number}].tool_calls",
        )
    calls: list[ToolCall] = []
    for place, entry in enumerate(entries):
        if isinstance(entry, HistoryCall):
            call = ToolCall(entry.id, entry.function.name, entry.function.arguments)
        else:
            call = _client_call(entry, f"messages[{number}].tool_calls[{place}]")
        calls.append(call)
    if len(calls) > 1:
        seen: set[str] = set()
        for call in calls:
            if call.id in seen:
                raise _duplicate(call.id, number)
            seen.add(call.id)
    return tuple(calls)


def _client_call(entry: ClientHistoryCall, path: str) -> ToolCall:
    if entry.function is not None:
        return ToolCall(entry.id, entry.function.name, _arguments(entry.function, path))
    if entry.custom is not None:
        # clients: custom-tools
        call = convert_value(entry.custom, CustomCall, f"{path}.custom")
        return ToolCall(entry.id, call.name, compact_json({"input": call.input}))
    raise InvalidBody("invalid request body: missing field `function`", param=f"{path}.function")


def _arguments(call: ClientFunctionCall, path: str) -> str:
    arguments = call.arguments
    if isinstance(arguments, str):
        return arguments
    # clients: argument-forms. JSON instead of its text.
    try:
        return "{}" if arguments is None else spaced_json(arguments)
    except RecursionError as error:
        raise InvalidBody(
            "invalid JSON request: recursion limit exceeded", param=f"{path}.function.arguments"
        ) from error


def _answer(waiting: dict[str, bool], missing: int, call_id: str, number: int) -> None:
    """Note the result of a call; the next messages after calls are their results, in any order."""
    if not missing:
        raise _orphan(number)
    open_call = waiting.get(call_id)
    if open_call is None:
        raise InvalidRequest(
            f"{_UNANSWERED}, The following tool_call_ids did not have response messages: {call_id}",
            param=f"messages[{number}].tool_call_id",
        )
    if not open_call:
        raise _duplicate(call_id, number)
    waiting[call_id] = False


def _orphan(number: int) -> InvalidRequest:
    return InvalidRequest(
        "Messages with role 'tool' must be a response to a preceding message with 'tool_calls'",
        param=f"messages[{number}]",
    )


def _unanswered(number: int) -> InvalidRequest:
    """number: of the message that stands where a result should, or one past the last."""
    return InvalidRequest(
        f"{_UNANSWERED}. (insufficient tool messages following tool_calls message)",
        param=f"messages[{number}]",
    )


def _duplicate(call_id: str, number: int) -> InvalidRequest:
    return InvalidRequest(
        f"Duplicate value for 'tool_call_id' of {call_id} in message[{number}]",
        param=f"messages[{number}]",
    )


def _modernise(entries: list[Any], number: int) -> None:
    """clients: functions. A call of the older interface and its result become tool call and result.

    Without a result behind it the call is ignored, as the official codec does.
    """
    entry = entries[number]
    result = entries[number + 1] if number + 1 < len(entries) else None
    if entry.tool_calls or not isinstance(result, FunctionEntry):
        return
    call_id = f"call_{number}"
    path = f"messages[{number}].function_call"
    call = convert_value(entry.function_call, ClientFunctionCall, path)
    entry.tool_calls = [ClientHistoryCall(call_id, function=call)]
    entries[number + 1] = ClientToolEntry(call_id, result.content)
