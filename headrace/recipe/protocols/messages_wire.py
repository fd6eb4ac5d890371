"""What an Anthropic Messages request looks like on the wire, as typed structs.

Contract: `OfficialRequest` is what the official codec reads, `ClientRequest` knows more kinds of
blocks. Decoding checks fields and types only; what they mean is checked by `messages.py` and
`messages_blocks.py`, the only readers. Unknown fields (`cache_control`, `citations`, ...) are
ignored. Values whose type is free stay raw JSON.
"""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from headrace.recipe.protocols.form_fields import FormFields

Block = TypeVar("Block")
ResultBlock = TypeVar("ResultBlock")

MediaType = Literal["image/jpeg", "image/jpg", "image/png", "image/gif", "image/webp"]
_NULL = Raw(b"null")

# --- content blocks --------------------------------------------------------------------------


class TextBlock(Struct, tag="text", gc=False):
    """Text."""

    text: str


class Base64Source(Struct, tag="base64", gc=False):
    """An image in the request itself."""

    media_type: MediaType
    data: str


class UrlSource(Struct, tag="url", gc=False):
    """An image somewhere else."""

    url: str


class FileSource(Struct, tag="file", gc=False):
    """An image uploaded before; there is no file store here."""

    file_id: str


class ImageBlock(Struct, tag="image"):
    """An image."""

    source: Base64Source | UrlSource | FileSource


class DocumentSource(Struct, gc=False):
    """Only the type of a document is read."""

    media_type: str | None = None


class DocumentBlock(Struct, tag="document"):
    """A document; prompts name its type only."""

    source: DocumentSource


class ThinkingBlock(Struct, tag="thinking", gc=False):
    """Reasoning of an earlier answer; any signature is taken."""

    thinking: str
    signature: str | None = None


class ToolUseBlock(Struct, tag="tool_use"):
    """A call of a tool in an earlier answer."""

    id: str
    name: str
    input: Raw


class ToolReferenceBlock(Struct, tag="tool_reference", gc=False):
    """A result names a deferred tool, which is offered from then on."""

    tool_name: str


class ToolResultBlock(Struct, Generic[ResultBlock], tag="tool_result"):
    """The result of a call."""

    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


class ServerToolUseBlock(Struct, tag="server_tool_use"):
    """A call of a tool that a hosted server ran."""

    id: str
    name: str
    input: Raw


class WebSearchResultBlock(Struct, tag="web_search_tool_result"):
    """What a hosted server's web search found."""

    tool_use_id: str
    content: Raw


class AddedTool(Struct, gc=False):
    """The deferred tool of an addition."""

    type: Literal["tool_reference"]
    name: str


class ToolAdditionBlock(Struct, tag="tool_addition"):
    """A system message offers a deferred tool."""

    tool: AddedTool


# --- blocks of level `clients` ----------------------------------------------------------------


class SearchResultBlock(Struct, tag="search_result"):
    """A passage that the client found itself."""

    content: list[TextBlock]
    title: str | None = None
    source: str | None = None


class RedactedThinkingBlock(Struct, tag="redacted_thinking", gc=False):
    """Reasoning that only its author can read."""


class HostedBlock(Struct, gc=False):
    """Base of traces that tools of a hosted server left in an assistant message."""


class WebFetchResultBlock(HostedBlock, tag="web_fetch_tool_result"):
    """A fetched page."""


class CodeResultBlock(HostedBlock, tag="code_execution_tool_result"):
    """Output of code."""


class BashResultBlock(HostedBlock, tag="bash_code_execution_tool_result"):
    """Output of a command."""


class EditorResultBlock(HostedBlock, tag="text_editor_code_execution_tool_result"):
    """Result of an edit."""


class ToolSearchResultBlock(HostedBlock, tag="tool_search_tool_result"):
    """Tools that were found."""


class McpToolUseBlock(HostedBlock, tag="mcp_tool_use"):
    """A call through a connector."""


class McpToolResultBlock(HostedBlock, tag="mcp_tool_result"):
    """The result of one."""


PartBlock = TextBlock | ImageBlock | DocumentBlock | ToolReferenceBlock | SearchResultBlock
OfficialPart = TextBlock | ImageBlock | DocumentBlock | ToolReferenceBlock

CommonBlock = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | ThinkingBlock
    | ServerToolUseBlock
    | ToolUseBlock
    | WebSearchResultBlock
    | ToolAdditionBlock
)
ClientOnlyBlock = (
    SearchResultBlock
    | RedactedThinkingBlock
    | WebFetchResultBlock
    | CodeResultBlock
    | BashResultBlock
    | EditorResultBlock
    | ToolSearchResultBlock
    | McpToolUseBlock
    | McpToolResultBlock
)
OfficialBlock = CommonBlock | ToolResultBlock[OfficialPart]
ClientBlock = CommonBlock | ClientOnlyBlock | ToolResultBlock[PartBlock]


# --- the request ------------------------------------------------------------------------------


class WireMessage(Struct, Generic[Block]):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class SystemBlock(Struct, gc=False):
    """One block of the system prompt."""

    type: Literal["text"]
    text: str


class WireTool(Struct):
    """A declared tool; one with a `type` is defined by Anthropic or run by its servers."""

    type: str | UnsetType = UNSET
    name: str | None = None
    description: str | None = None
    input_schema: Raw = _NULL
    defer_loading: bool | None = None
    strict: Any = None


class AutoChoice(Struct, tag="auto", gc=False):
    """The model decides."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(Struct, tag="any", gc=False):
    """Some tool has to be called."""

    disable_parallel_tool_use: bool | None = None


class NamedChoice(Struct, tag="tool", gc=False):
    """This tool has to be called."""

    name: str
    disable_parallel_tool_use: bool | None = None


class NoneChoice(Struct, tag="none", gc=False):
    """No tool may be called."""


class WireThinking(Struct, gc=False):
    """`thinking`: the explicit switch."""

    type: str
    budget_tokens: int | None = None


class WireOutputConfig(Struct):
    """`output_config`; `format` counts at level `clients`."""

    effort: str | int | None = None
    format: Raw = _NULL


class WireMetadata(Struct, gc=False):
    """`metadata`: type-checked, not used."""

    user_id: str | None = None


class WireRequest(FormFields, Generic[Block]):
    """Body of a Messages request: the fields that are used.

    tools: a raw list of `WireTool`. top_k, output_format, chat_template_kwargs: raw, because the
    official codec ignores them.
    """

    model: str
    messages: list[WireMessage[Block]]
    system: str | list[SystemBlock] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: Raw = _NULL
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoneChoice | None = None
    thinking: WireThinking | None = None
    output_config: WireOutputConfig | None = None
    metadata: WireMetadata | None = None
    top_k: Raw = _NULL
    output_format: Raw = _NULL
    chat_template_kwargs: Raw = _NULL


# Classes of their own: the decoder finds its plan for a class faster than for an alias.


class OfficialRequest(WireRequest[OfficialBlock]):
    """Body as the official codec reads it."""


class ClientRequest(WireRequest[ClientBlock], kw_only=True):
    """Body at level `clients`."""

    coupling: Any = None
    speculation: Any = None


class JsonFormat(Struct):
    """`output_config.format`: the one kind there is."""

    schema: Any
    type: Literal["json_schema"] = "json_schema"


def tag_of(block: Struct) -> str:
    """The `type` of a block."""
    config: msgspec.structs.StructConfig = block.__struct_config__
    return str(config.tag)
