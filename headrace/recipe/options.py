"""What whoever runs the codec decides: level, defaults and limits of the conversion.

`official` is byte parity with deepseek-recipe 0.2.0 in everything it accepts and refuses. `clients`
gives the same prompts for those requests, but also accepts what real clients send and answers so
that their SDKs are satisfied; every difference has a row in docs/recipe.md. Read by `protocols/`,
`parser/` and `events/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.recipe.constants import SpecialTokens


class Level(StrEnum):
    """Whose behaviour counts; chosen per server and per call."""

    OFFICIAL = "official"
    CLIENTS = "clients"


class ModelVersion(StrEnum):
    """Prompt format of a model."""

    V4 = "v4"
    V41 = "v4.1"


class MissingReasoning(StrEnum):
    """What to do with assistant history that lacks its reasoning in thinking mode."""

    FILL_EMPTY = "fill_empty"
    REJECT = "reject"


class WebSearch(StrEnum):
    """What to do with declared web search tools, which nobody here can run."""

    DROP = "drop"
    REJECT = "reject"


# The names that the official codec knows; a server adds its own or replaces them.
MODEL_VERSIONS: Mapping[str, ModelVersion] = {
    "DeepSeek-V4-Pro": ModelVersion.V4,
    "DeepSeek-V4.1-Flash": ModelVersion.V41,
}
MAX_TOKENS_BOUND = 393_216


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Options of request -> conversation; the defaults are the official ones at level `clients`.

    strip_attribution: remove the changing attribution line that Claude Code puts into its system
    prompt also where the official codec leaves it, so that prefixes stay cacheable. context_limit:
    tokens of prompt and answer that the model takes, for errors; None: not known.
    """

    level: Level = Level.CLIENTS
    default_thinking_mode: bool = True
    missing_reasoning: MissingReasoning = MissingReasoning.FILL_EMPTY
    responses_web_search: WebSearch = WebSearch.DROP
    messages_web_search: WebSearch = WebSearch.REJECT
    thinking_max_tokens_bound: int = MAX_TOKENS_BOUND
    non_thinking_max_tokens_bound: int = MAX_TOKENS_BOUND
    model_versions: Mapping[str, ModelVersion] = field(default_factory=lambda: MODEL_VERSIONS)
    special: SpecialTokens = field(default_factory=SpecialTokens)
    strip_attribution: bool = False
    max_messages: int = 4096
    context_limit: int | None = None

    @property
    def official(self) -> bool:
        """Whether the level is `official`."""
        return self.level is Level.OFFICIAL
