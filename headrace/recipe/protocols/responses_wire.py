"""Wire structs of a Responses request: the fields that are used, with their JSON types.

One struct holds the fields of all types of items (tools, parts), which decodes fastest; what a type
needs is checked by `responses_checks.py`. Fields that the official codec ignores have no type.
Decoded by `responses_read.py`.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Raw, Struct, UnsetType

from headrace.recipe.protocols.form_fields import FormFields

NULL = Raw(b"null")
MISSING = Raw(b"")
WEB_SEARCH_TYPES = frozenset(("web_search", "web_search_2025_08_26"))


class WirePart(Struct, gc=False):
    """One part of a content or output list."""

    type: str | None = None
    text: str | None = None
    image_url: str | None = None
    detail: str | None = None
    file_id: str | None = None
    refusal: str | None = None


class WireLocation(Struct, gc=False):
    """`user_location` of a web search tool; echoed only."""

    city: str | None = None
    country: str | None = None
    region: str | None = None
    timezone: str | None = None


class WireTool(Struct):
    """A declared or found tool."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: Raw = NULL
    strict: bool | None = None
    tools: list[WireTool] | None = None
    execution: str | None = None
    format: Raw = NULL
    search_context_size: str | None = None
    user_location: WireLocation | None = None


class WireItem(Struct):
    """An input item; `type` is absent in the short form of messages."""

    type: str | UnsetType = UNSET
    role: str | UnsetType = UNSET
    content: str | list[WirePart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Raw] | None = None
    input: str | None = None
    output: str | list[WirePart] | None = None
    tools: list[WireTool] | None = None
    execution: str | None = None
    encrypted_content: str | None = None


class WireChoice(Struct):
    """`tool_choice` as an object; mode and tools belong to `allowed_tools`."""

    type: str | None = None
    name: str | None = None
    namespace: str | None = None
    mode: str | None = None
    tools: list[WireChoice] | None = None


class WireFormat(Struct):
    """`text.format`."""

    type: str | None = None
    name: str | None = None
    schema: Raw = MISSING
    description: str | None = None
    strict: bool | None = None


class WireText(Struct):
    """`text`."""

    format: WireFormat | UnsetType = UNSET
    verbosity: str | None = None


class WireReasoning(Struct):
    """`reasoning`."""

    effort: str | int | None = None
    summary: str | None = None
    generate_summary: str | None = None


class WireResponses(FormFields, kw_only=True):
    """Body of POST /v1/responses. Fields that the official codec ignores have no type."""

    model: str
    input: str | list[WireItem] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    user: str | None = None
    reasoning: WireReasoning | None = None
    text: WireText | None = None
    tools: list[WireTool] | None = None
    tool_choice: str | WireChoice | None = None
    include: Any = None
    store: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    metadata: Any = None
    parallel_tool_calls: Any = None
    truncation: Any = None
    thinking: Any = None
    chat_template_kwargs: Any = None
    coupling: Any = None
    speculation: Any = None
