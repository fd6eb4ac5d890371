"""The codec of one checkpoint: its tokenizer, its control tokens, its prompt format.

Contract: made once per checkpoint by `Codec.from_directory` (or from parts in tests), immutable and
thread-safe afterwards. It joins what the modules of this package do one by one: a converted request
becomes prompt ids and sampling parameters, and an `AnswerStream` that reads the answer. Used by
`serve` and `generate`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from headrace.core.grammar import GrammarSpec
from headrace.core.sampling import SamplingParams, StopScope
from headrace.errors import ContextTooLong, InvalidRequest
from headrace.recipe.binding import ConfigTokenIds, bind
from headrace.recipe.constants import SpecialTokens
from headrace.recipe.conversation import Conversation
from headrace.recipe.converted import ConvertedRequest, ParsingOptions, Protocol, ThinkingStage
from headrace.recipe.grammar.calls import Markup
from headrace.recipe.grammar.rules import AnswerRules
from headrace.recipe.grammar.spec import AnswerStart, grammar_spec
from headrace.recipe.options import ConvertOptions, ModelVersion
from headrace.recipe.prompt_size import largest_field
from headrace.recipe.protocols.sampling import resolve_max_tokens
from headrace.recipe.render import CALL_FORMATS, render
from headrace.recipe.stream import AnswerStream
from headrace.recipe.tokenizer import Tokenizer

_REASONING = (ThinkingStage.REASONING_START, ThinkingStage.REASONING_CONTINUATION)
# What a protocol calls the fields that errors of later stages name.
_FIELDS: dict[Protocol, dict[str, str]] = {
    Protocol.CHAT: {},
    Protocol.RESPONSES: {"messages": "input", "max_tokens": "max_output_tokens"},
    Protocol.MESSAGES: {"stop": "stop_sequences"},
}


def check_length(least_tokens: int, context_limit: int, param: str) -> None:
    """Raise ContextTooLong when a prompt of at least `least_tokens` leaves no room to answer."""
    if least_tokens >= context_limit:
        what = f"the {param}" if param.isidentifier() else param
        raise ContextTooLong(
            f"This model's maximum context length is {context_limit} tokens. However, your "
            f"request has at least {least_tokens} tokens. Please reduce the length of {what}.",
            param=param,
        )


@dataclass(frozen=True, slots=True)
class Codec:
    """Requests to ids, and ids to answers, for one checkpoint."""

    tokenizer: Tokenizer
    special: SpecialTokens
    version: ModelVersion = ModelVersion.V41

    @classmethod
    def from_directory(cls, directory: Path, special: SpecialTokens | None = None) -> Codec:
        """Load tokenizer.json and check it against config.json.

        Raises CheckpointError or ModelConfigError that names what is missing.
        """
        tokenizer = Tokenizer.from_directory(directory)
        ids = ConfigTokenIds.from_directory(directory)
        return cls(tokenizer, bind(tokenizer, ids, special, ids.version), ids.version)

    def options(
        self,
        model: str,
        *,
        default_thinking_mode: bool = True,
        max_messages: int = 4096,
        context_limit: int | None = None,
    ) -> ConvertOptions:
        """Options to convert requests that name this checkpoint `model`; the others as there."""
        return ConvertOptions(
            default_thinking_mode=default_thinking_mode,
            max_messages=max_messages,
            model_versions={model: self.version},
            special=self.special,
            context_limit=context_limit,
        )

    def encode(
        self, request: ConvertedRequest | Conversation, *, context_limit: int | None = None
    ) -> list[int]:
        """Prompt ids. Raises InvalidRequest for text that this tokenizer cannot encode.

        context_limit: tokens; a prompt that cannot be shorter is refused with ContextTooLong before
        it is tokenized, which would take long for nothing. One that is refused by its true length
        is left to `sampling`.
        """
        converted = request if isinstance(request, ConvertedRequest) else None
        conversation = request.conversation if isinstance(request, ConvertedRequest) else request
        prompt = render(conversation, self.version, self.special)
        if context_limit is not None and (
            (least := self.tokenizer.least_tokens(prompt)) >= context_limit
        ):
            field = "messages" if converted is None else self._largest_field(converted)
            check_length(least, context_limit, field)
        return self.tokenizer.encode_prompt(prompt)

    def _largest_field(self, request: ConvertedRequest) -> str:
        """The field to shorten when the prompt is too long."""
        prompt = render(request.conversation, self.version, self.special)
        messages = _FIELDS[request.protocol].get("messages", "messages")
        return largest_field(request, messages, len(prompt.text))

    def count(self, request: ConvertedRequest) -> int:
        """Length of `encode` in tokens."""
        return self.tokenizer.count(render(request.conversation, self.version, self.special))

    def sampling(
        self, request: ConvertedRequest, prompt_tokens: int, context_limit: int
    ) -> SamplingParams:
        """What the engine is asked for. Raises InvalidRequest and ContextTooLong."""
        inference, parsing = request.inference, request.parsing
        try:
            max_tokens = resolve_max_tokens(
                request.conversation, inference.max_tokens, prompt_tokens, context_limit
            )
            extra = dict(inference.extra)
            if "min_tokens" in extra:
                # The request may ask for more than there is room for.
                extra["min_tokens"] = min(extra["min_tokens"], max_tokens)
            return SamplingParams(
                temperature=inference.temperature,
                top_p=inference.top_p,
                seed=inference.seed,
                n=inference.n,
                max_tokens=max_tokens,
                stop=parsing.stops,
                stop_scope=self.stop_scope(parsing),
                logprobs=(inference.top_logprobs or 0) if inference.logprobs else None,
                grammar=self.grammar(request),
                **extra,
            )
        except ContextTooLong as error:
            field = self._largest_field(request)
            more = "" if field.isidentifier() else f" The longest part is {field}."
            raise ContextTooLong(error.message + more, param=field) from None
        except InvalidRequest as error:
            name = error.param or ""
            error.param = _FIELDS[request.protocol].get(name, error.param)
            raise

    def grammar(self, request: ConvertedRequest) -> GrammarSpec | None:
        """What the answer is held to, and from where on."""
        if request.rules is None:
            return None
        return self.answer_grammar(request.rules, request.parsing, request.version)

    def answer_grammar(
        self, rules: AnswerRules, parsing: ParsingOptions, version: ModelVersion | None = None
    ) -> GrammarSpec | None:
        """The grammar of these rules for an answer that is read so. version: None: the codec's."""
        added = self.tokenizer.added
        start = AnswerStart(
            parsing.thinking_stage in _REASONING,
            parsing.starts_in_tool_calls,
            added[self.special.thinking_end],
        )
        markup = Markup(CALL_FORMATS[version or self.version], added[self.special.dsml])
        return grammar_spec(rules, start, markup)

    def stop_scope(self, parsing: ParsingOptions) -> StopScope:
        """The part of an answer in which stop strings count: its content, without tool calls."""
        added, stage = self.tokenizer.added, parsing.thinking_stage
        markup = parsing.parse_tool_calls or parsing.suppress_markup
        return StopScope(
            border_token=added[self.special.thinking_end],
            after_border=stage in _REASONING,
            skip_newlines=stage is not ThinkingStage.CONTENT_CONTINUATION,
            end_token=added[self.special.dsml] if markup else None,
        )

    def answer(
        self,
        request: ConvertedRequest,
        *,
        response_id: str,
        model: str,
        created: int | None = None,
    ) -> AnswerStream:
        """Reads the answer to a request, fed with what an engine says that searches the stops."""
        return AnswerStream(
            request,
            response_id=response_id,
            model=model,
            special=self.special,
            tokenizer=self.tokenizer,
            created=created,
            parsing=replace(request.parsing, engine_stops=True),
            silent=not request.stream,
        )
