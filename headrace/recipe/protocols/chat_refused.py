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

REFUSED: dict[str, Refused] = {
    "best_of": Refused("this server does not rank choices; ask for n of them", (1,)),
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
    "prompt_logprobs": Refused(
        "this server does not return log probabilities of the prompt; `LLM.generate` does"
    ),
    "bad_words": Refused("this server bans tokens only, by logit_bias", ([],)),
    "include_stop_str_in_output": Refused("text always ends before a stop string", (False,)),
    "use_beam_search": Refused("this server has no beam search", (False,)),
    "length_penalty": Refused("this server has no beam search", (1,)),
    "echo": Refused("the prompt is not part of the answer", (False,)),
    "skip_special_tokens": Refused("control tokens are never part of an answer", (True,)),
    "truncate_prompt_tokens": Refused("prompts are never cut"),
    "return_tokens_as_token_ids": Refused("tokens are returned as text", (False,)),
    "return_token_ids": Refused("tokens are returned as text", (False,)),
    "logits_processors": Refused("this server runs no code of its clients", ([],)),
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
