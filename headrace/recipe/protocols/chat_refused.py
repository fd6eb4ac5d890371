"""Fields of Chat Completions without which an answer would be wrong, and that nobody here honours.

Contract: a field listed here is accepted only with a value that asks for nothing; any other value
is refused with its name. Wishes (`verbosity`, `modalities`, `web_search_options` ...)
and unknown fields are ignored. Level `official` ignores them all; rows leave this table as features
arrive. Called by `chat.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from headrace.errors import InvalidRequest
from headrace.recipe.protocols.chat_wire import ClientRequest


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a field is refused, and the values (besides null) that ask for nothing."""

    reason: str
    harmless: tuple[object, ...] = ()


REFUSED: dict[str, Refused] = {
    "best_of": Refused("every choice that is computed is returned; ask for them by n", (1,)),
    "guided_whitespace_pattern": Refused(
        "white space between the parts of JSON is free up to 32 characters; for another rule "
        "describe the whole answer by guided_regex or guided_grammar"
    ),
    "prompt_logprobs": Refused(
        "this server does not return log probabilities of the prompt; `LLM.generate` does"
    ),
    "bad_words": Refused("this server bans tokens only, by logit_bias", ([],)),
    "include_stop_str_in_output": Refused("text always ends before a stop string", (False,)),
    "use_beam_search": Refused("this server has no beam search", (False,)),
    "echo": Refused("the prompt is not part of the answer", (False,)),
    "skip_special_tokens": Refused("control tokens are never part of an answer", (True,)),
    "truncate_prompt_tokens": Refused("prompts are never cut"),
    "return_tokens_as_token_ids": Refused("tokens are returned as text", (False,)),
    "return_token_ids": Refused("tokens are returned as text", (False,)),
    "logits_processors": Refused("this server runs no code of its clients", ([],)),
    "continue_final_message": Refused(
        "mark the last assistant message with prefix = true instead", (False,)
    ),
    "add_generation_prompt": Refused(
        "mark the last assistant message with prefix = true instead", (True,)
    ),
    "chat_template": Refused("this server has a fixed prompt format"),
    "documents": Refused("this server does not support documents", ([],)),
}
_values = attrgetter(*REFUSED)
_NOTHING = (None,) * len(REFUSED)


def refuse_unsupported(wire: ClientRequest) -> None:
    """clients: refused-fields. InvalidRequest for the first that asks for something."""
    values = _values(wire)
    if values == _NOTHING:
        return
    for (name, refused), value in zip(REFUSED.items(), values, strict=True):
        if value is not None and not any(_same(value, harmless) for harmless in refused.harmless):
            raise InvalidRequest(f"{name}: {refused.reason}.", param=name)


def _same(value: object, harmless: object) -> bool:
    """Equality that keeps booleans and numbers apart, as JSON does."""
    return isinstance(value, bool) == isinstance(harmless, bool) and value == harmless
