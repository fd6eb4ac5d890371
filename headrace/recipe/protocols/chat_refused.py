"""Fields of Chat Completions that this version cannot honour.

Contract: a field listed here is accepted only with a value that asks for nothing; any other value
is refused with its name. An answer that silently ignores what was asked is worse than an error.
Rows leave this table as features arrive.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a field is refused, and the values (besides null) that ask for nothing."""

    reason: str
    harmless: tuple[object, ...] = ()


_TOOLS = "this server does not support tools yet"
_CONSTRAINT = "this server does not support constrained output yet"
_LOGPROBS = "this server does not return log probabilities yet"
_PENALTY = "this server does not support penalties yet"

REFUSED: dict[str, Refused] = {
    "n": Refused("Invalid n value (currently only n = 1 is supported)", (1,)),
    "best_of": Refused("this server returns one choice", (1,)),
    "stop": Refused("this server does not support stop strings yet", ([],)),
    "tools": Refused(_TOOLS, ([],)),
    "tool_choice": Refused(_TOOLS, ("none", "auto")),
    "functions": Refused(_TOOLS, ([],)),
    "function_call": Refused(_TOOLS, ("none", "auto")),
    "response_format": Refused(_CONSTRAINT, ({"type": "text"},)),
    "guided_json": Refused(_CONSTRAINT),
    "guided_regex": Refused(_CONSTRAINT),
    "guided_choice": Refused(_CONSTRAINT),
    "guided_grammar": Refused(_CONSTRAINT),
    "structured_outputs": Refused(_CONSTRAINT),
    "logprobs": Refused(_LOGPROBS, (False,)),
    "top_logprobs": Refused(_LOGPROBS, (0,)),
    "prompt_logprobs": Refused(_LOGPROBS, (0,)),
    "logit_bias": Refused("this server does not support logit_bias yet", ({},)),
    "presence_penalty": Refused(_PENALTY, (0,)),
    "frequency_penalty": Refused(_PENALTY, (0,)),
    "repetition_penalty": Refused(_PENALTY, (1,)),
    "min_p": Refused("this server does not support min_p yet", (0,)),
    "min_tokens": Refused("this server does not support min_tokens yet", (0,)),
    "modalities": Refused("this server answers in text only", (["text"],)),
    "audio": Refused("this server answers in text only"),
    "prediction": Refused("this server does not support predicted outputs"),
    "web_search_options": Refused("this server has no web search"),
    "verbosity": Refused("this model has no verbosity setting", ("medium",)),
    "continue_final_message": Refused(
        "mark the last assistant message with prefix = true instead", (False,)
    ),
    "add_generation_prompt": Refused(
        "mark the last assistant message with prefix = true instead", (True,)
    ),
    "chat_template": Refused("this server has a fixed prompt format"),
    "documents": Refused("this server does not support documents", ([],)),
}


def refuse_unsupported(fields: dict[str, object]) -> None:
    """Raise InvalidRequest for the first field that asks for something unsupported."""
    for name, value in fields.items():
        refused = REFUSED.get(name)
        if refused is None or value is None:
            continue
        if not any(_same(value, harmless) for harmless in refused.harmless):
            raise InvalidRequest(f"{name}: {refused.reason}.", param=name)


def _same(value: object, harmless: object) -> bool:
    """Equality that keeps booleans and numbers apart, as JSON does."""
    return isinstance(value, bool) == isinstance(harmless, bool) and value == harmless
