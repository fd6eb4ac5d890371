"""The body of Chat Completions as typed structures: a strict set and one for real clients.

Contract: the strict set (`OfficialRequest`) takes and refuses what the official codec does; the
other (`ClientRequest`) has the same attributes, so that `chat.py` reads both alike, but takes more.
Fields of other roles are ignored, as are unknown ones. Read by `chat.py` and `chat_tools.py`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

# --- content ---------------------------------------------------------------------------------


class ImageUrl(msgspec.Struct):
    """Where an image is."""

    url: str
    detail: Literal["low", "high", "original", "auto"] | None = None


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A piece of text."""

    text: str


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    """An image by its URL."""

    image_url: ImageUrl


class FilePart(msgspec.Struct, tag_field="type", tag="file"):
    """A file; only images by data URL are understood."""

    file_id: str | None = None
    file_data: str | None = None
    filename: str | None = None


class ClientImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    """clients: part-forms. The URL may stand without its object."""

    image_url: ImageUrl | str


class ClientFilePart(FilePart, tag_field="type", tag="file"):
    """clients: part-forms. Nested in `file`, which is `FileFields` if it is anything."""

    file: Any = None


class FileFields(msgspec.Struct):
    """The fields of a file part, nested."""

    file_id: str | None = None
    file_data: str | None = None
    filename: str | None = None


class InputTextPart(msgspec.Struct, tag_field="type", tag="input_text"):
    """clients: part-forms. The name that Responses has for text."""

    text: str


class OutputTextPart(msgspec.Struct, tag_field="type", tag="output_text"):
    """clients: part-forms. The name that Responses has for text of the model."""

    text: str


class InputImagePart(msgspec.Struct, tag_field="type", tag="input_image"):
    """clients: part-forms. The form that Responses has for images."""

    image_url: ImageUrl | str
    detail: Literal["low", "high", "original", "auto"] | None = None


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal"):
    """clients: refusals. What the model said when it refused."""

    refusal: str


Part = TextPart | ImagePart | FilePart
ClientPart = (
    TextPart
    | ClientImagePart
    | ClientFilePart
    | InputTextPart
    | OutputTextPart
    | InputImagePart
    | RefusalPart
)

# --- messages --------------------------------------------------------------------------------


class FunctionCall(msgspec.Struct):
    """Name and arguments of a call."""

    name: str
    arguments: str


class HistoryCall(msgspec.Struct):
    """A call in the history."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class SystemEntry(msgspec.Struct, tag_field="role", tag="system"):
    """Instructions."""

    content: str | list[Part]
    name: str | None = None


class UserEntry(msgspec.Struct, tag_field="role", tag="user"):
    """What the user said."""

    content: str | list[Part]
    name: str | None = None


class AssistantEntry(msgspec.Struct, tag_field="role", tag="assistant"):
    """An earlier answer."""

    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    tool_calls: list[HistoryCall] | None = None
    prefix: bool | None = None
    name: str | None = None


class ToolEntry(msgspec.Struct, tag_field="role", tag="tool"):
    """Result of a call."""

    content: str | list[Part]
    tool_call_id: str


class ReminderEntry(msgspec.Struct, tag_field="role", tag="latest_reminder"):
    """A reminder between messages."""

    content: str


class ClientFunctionCall(msgspec.Struct):
    """clients: argument-forms. They may be missing, or JSON instead of its text."""

    name: str
    arguments: str | dict[str, Any] | list[Any] | None = None


class CustomCall(msgspec.Struct):
    """Name and free-form input of a call of a custom tool."""

    name: str
    input: str = ""


class ClientHistoryCall(msgspec.Struct):
    """clients: custom-tools. Calls of custom tools; `type` may be missing.

    `custom` is of free type: the official codec ignores it beside `function`.
    """

    id: str
    type: Literal["function", "custom"] | None = None
    function: ClientFunctionCall | None = None
    custom: Any = None


class ClientSystemEntry(msgspec.Struct, tag_field="role", tag="system"):
    """Instructions."""

    content: str | list[ClientPart]


class DeveloperEntry(msgspec.Struct, tag_field="role", tag="developer"):
    """clients: developer-role. OpenAI's newer name of system."""

    content: str | list[ClientPart]


class ClientUserEntry(msgspec.Struct, tag_field="role", tag="user"):
    """What the user said."""

    content: str | list[ClientPart]


class ClientAssistantEntry(msgspec.Struct, tag_field="role", tag="assistant"):
    """clients: reasoning-alias. `reasoning`; also `function_call` and `refusal`.

    These are of free type: the official codec ignores them whatever they are.
    """

    content: str | list[ClientPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[ClientHistoryCall] | None = None
    prefix: bool | None = None
    reasoning: Any = None
    function_call: Any = None
    refusal: Any = None


class ClientToolEntry(msgspec.Struct, tag_field="role", tag="tool"):
    """clients: null-content. A result may be null."""

    tool_call_id: str
    content: str | list[ClientPart] | None = None


class FunctionEntry(msgspec.Struct, tag_field="role", tag="function"):
    """clients: functions. Result of a call of the older function interface."""

    name: str | None = None
    content: str | list[ClientPart] | None = None


class ClientReminderEntry(msgspec.Struct, tag_field="role", tag="latest_reminder"):
    """clients: part-forms. Content may be a list of parts."""

    content: str | list[ClientPart]


Entry = SystemEntry | UserEntry | AssistantEntry | ToolEntry | ReminderEntry
ClientEntry = (
    ClientSystemEntry
    | DeveloperEntry
    | ClientUserEntry
    | ClientAssistantEntry
    | ClientToolEntry
    | FunctionEntry
    | ClientReminderEntry
)

# --- response format ---------------------------------------------------------------------------


class TextFormat(msgspec.Struct, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object"):
    """Any JSON object."""


class SchemaFields(msgspec.Struct):
    """A schema for the answer."""

    schema: msgspec.Raw
    name: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    """JSON that fits a schema."""

    json_schema: SchemaFields


class RegexFormat(msgspec.Struct, tag_field="type", tag="regex"):
    """Text that fits a pattern."""

    regex: str


Format = TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat

# --- tools -------------------------------------------------------------------------------------


class FunctionFields(msgspec.Struct):
    """A function as it is declared."""

    name: str
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw()
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A declared tool."""

    type: Literal["function"]
    function: FunctionFields


class NamedFunction(msgspec.Struct):
    """Name of a tool."""

    name: str


class NamedChoice(msgspec.Struct):
    """The choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


# --- request -----------------------------------------------------------------------------------


class Thinking(msgspec.Struct):
    """The explicit switch; a budget is read and not used."""

    type: str
    budget_tokens: int | None = None


class StreamOptions(msgspec.Struct):
    """Options of streams."""

    include_usage: bool | None = None


class TemplateOptions(msgspec.Struct):
    """clients: thinking-switches. Those of other servers."""

    thinking: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | int | None = None


class _Common(msgspec.Struct, kw_only=True):
    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Format | None = None
    # Read by themselves: they come with every request of an agent, and what became of them is
    # remembered by their bytes.
    tools: msgspec.Raw = msgspec.Raw()
    thinking: Thinking | None = None
    reasoning_effort: str | int | None = None
    parallel_tool_calls: bool | None = None


class OfficialRequest(_Common, kw_only=True):
    """What the official codec reads of a body."""

    messages: list[Entry]
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None


class ClientRequest(_Common, kw_only=True):
    """clients: sampling-fields. Also the fields of OpenAI and vLLM that change an answer.

    The group of `guided_json` asks for a form of the answer, in vLLM's words. The last group asks
    for things that nobody here can do, see `chat_refused.py`.
    """

    messages: list[ClientEntry]
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    chat_template_kwargs: TemplateOptions | None = None
    functions: msgspec.Raw = msgspec.Raw()
    function_call: str | NamedFunction | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logprobs_mode: str | None = None
    coupling: Any = None
    speculation: Any = None

    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json_object: Any = None
    structured_outputs: Any = None

    guided_whitespace_pattern: Any = None
    best_of: Any = None
    prompt_logprobs: Any = None
    bad_words: Any = None
    include_stop_str_in_output: Any = None
    use_beam_search: Any = None
    echo: Any = None
    skip_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    return_tokens_as_token_ids: Any = None
    return_token_ids: Any = None
    logits_processors: Any = None
    continue_final_message: Any = None
    add_generation_prompt: Any = None
    chat_template: Any = None
    documents: Any = None
