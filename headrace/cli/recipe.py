"""`headrace recipe`: the token codec on files or standard input, without a model or a server.

Contract: what is asked for goes to standard output and nothing else does; a request that the codec
refuses exits with 2 and the codec's own text. Imports no torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from headrace.errors import InvalidRequest

if TYPE_CHECKING:
    from headrace.cli.recipe_input import Given
    from headrace.recipe.conversation import Conversation
    from headrace.recipe.converted import ConvertedRequest
    from headrace.recipe.options import ConvertOptions, ModelVersion
    from headrace.recipe.render.prompt import RenderedPrompt
    from headrace.recipe.tokenizer import Tokenizer

ProtocolFlag = Literal["chat", "responses", "messages", "conversation"]
LevelFlag = Literal["official", "clients"]
VersionFlag = Literal["v4", "v4.1"]
JsonFlag = Annotated[bool, Parameter(name="--json", negative="")]


def render(
    file: Path | None = None,
    /,
    *,
    protocol: ProtocolFlag | None = None,
    level: LevelFlag = "clients",
    model_version: VersionFlag | None = None,
    tokenizer: Path | None = None,
    as_json: JsonFlag = False,
) -> int:
    """Show the prompt of a request as text, exactly as the model would get it.

    Example:

        headrace recipe render request.json
        curl ... | headrace recipe render --protocol messages --json

    Parameters
    ----------
    file: Path
        The request body, one JSON object (default: standard input).
    protocol: str
        How to read it (default: guessed from its fields). `conversation` is the neutral form that
        `--json` shows.
    level: str
        official: what deepseek-recipe 0.2.0 accepts; clients: also what real clients send.
    model_version: str
        Prompt format (default: that of the model which the request names).
    tokenizer: Path
        Checkpoint folder or tokenizer.json; here it only decides how the image token is spelled.
    as_json: bool
        Print one JSON object: prompt, places of control tokens, images, conversation, sampling
        and how the answer is read.
    """
    request = _read(file, protocol, level, model_version, tokenizer, needs_ids=False)
    if not as_json:
        sys.stdout.write(request.prompt.text + ("\n" if sys.stdout.isatty() else ""))
        return 0
    print(json.dumps(request.shown(), ensure_ascii=False))
    return 0


def encode(
    file: Path | None = None,
    /,
    *,
    tokenizer: Path | None = None,
    protocol: ProtocolFlag | None = None,
    level: LevelFlag = "clients",
    model_version: VersionFlag | None = None,
    as_json: JsonFlag = False,
) -> int:
    """Show the token ids of a request's prompt: a JSON list, an image is one id in it.

    Example:

        headrace recipe encode request.json --tokenizer my-model

    Parameters
    ----------
    file: Path
        The request body, one JSON object (default: standard input).
    tokenizer: Path
        Checkpoint folder or tokenizer.json.
    protocol: str
        How to read the request (default: guessed from its fields).
    level: str
        official: what deepseek-recipe 0.2.0 accepts; clients: also what real clients send.
    model_version: str
        Prompt format (default: that of the model which the request names).
    as_json: bool
        Print one JSON object with ids, their number, images, conversation, sampling and how the
        answer is read.
    """
    request = _read(file, protocol, level, model_version, tokenizer, needs_ids=True)
    ids = list(request.ids())
    if not as_json:
        print(json.dumps(ids))
        return 0
    print(json.dumps({"ids": ids, "count": len(ids), **request.shown()}, ensure_ascii=False))
    return 0


def count(
    file: Path | None = None,
    /,
    *,
    tokenizer: Path | None = None,
    protocol: ProtocolFlag | None = None,
    level: LevelFlag = "clients",
    model_version: VersionFlag | None = None,
    as_json: JsonFlag = False,
) -> int:
    """Count the prompt tokens of a request; images count as many tokens as they will have.

    Example:

        headrace recipe count request.json --tokenizer my-model

    Images must be data URLs: the size of a remote one is not known here.

    Parameters
    ----------
    file: Path
        The request body, one JSON object (default: standard input).
    tokenizer: Path
        Checkpoint folder or tokenizer.json.
    protocol: str
        How to read the request (default: guessed from its fields).
    level: str
        official: what deepseek-recipe 0.2.0 accepts; clients: also what real clients send.
    model_version: str
        Prompt format (default: that of the model which the request names).
    as_json: bool
        Print one JSON object: all tokens, those of text and of every image.
    """
    request = _read(file, protocol, level, model_version, tokenizer, needs_ids=True)
    images = request.image_tokens()
    text = len(request.ids()) - len(images)
    total = text + sum(images)
    if as_json:
        print(json.dumps({"prompt_tokens": total, "text_tokens": text, "image_tokens": images}))
    else:
        print(total)
    return 0


def decode(
    file: Path | None = None,
    /,
    *,
    request: Path | None = None,
    tokenizer: Path | None = None,
    input_format: Literal["chunks", "ids", "text"] | None = None,
    protocol: Literal["chat", "responses", "messages"] | None = None,
    thinking: Annotated[bool, Parameter(negative="--no-thinking")] = True,
    stream: Annotated[bool, Parameter(negative="")] = False,
    level: LevelFlag = "clients",
    model_version: VersionFlag | None = None,
    as_json: JsonFlag = False,
) -> int:
    """Turn a model's output into a response, or with --stream into its server-sent events.

    Example:

        echo "Hm.</think>Hello" | headrace recipe decode
        headrace recipe decode output.jsonl --request request.json --tokenizer my-model --stream

    The output is raw text, ids (one list a line: `[72, 105]` or `72 105`), or chunks as an engine
    gives them, one JSON object a line:

        {"ready": {"prompt_usage": {"prompt_tokens": 9, "prompt_cache_hit_tokens": 0}}}
        {"tokens": [72, 105]}
        {"text": "Hi", "token_count": 1}
        {"finish": "stop"}

    Parameters
    ----------
    file: Path
        The output (default: standard input).
    request: Path
        The request it answers: it decides protocol, tools, stop sequences and response format
        (default: a chat request in which the model may reason and call any tool).
    tokenizer: Path
        Checkpoint folder or tokenizer.json; ids need it, with text it counts reasoning tokens.
    input_format: str
        chunks, ids or text (default: seen from the first line).
    protocol: str
        Protocol of the response (default: that of the request, or chat).
    thinking: bool
        Whether the output begins with reasoning, when no request says it.
    stream: bool
        Print the events instead of the complete response.
    level: str
        official: as deepseek-recipe 0.2.0 answers; clients: as real clients expect it.
    model_version: str
        Prompt format of the model that the request names.
    as_json: bool
        One line of JSON instead of an indented response; with --stream {"event", "data"} lines.
    """
    from headrace.cli.recipe_decode import DecodeOptions, answer_of

    answer = answer_of(
        DecodeOptions(
            file=file,
            request=request,
            tokenizer=tokenizer,
            input_format=input_format,
            protocol=protocol,
            thinking=thinking,
            level=level,
            model_version=model_version,
        ),
        complete=not stream,
    )
    for line in answer.lines(as_json):
        sys.stdout.write(line)
    return 0


class _Request:
    """A request on its way: converted, rendered, and encoded when ids are asked for."""

    def __init__(
        self,
        conversation: Conversation,
        version: ModelVersion,
        options: ConvertOptions,
        tokenizer: Tokenizer | None,
        converted: ConvertedRequest | None,
    ) -> None:
        from headrace.recipe.render import render as render_prompt

        self.conversation = conversation
        self.version = version
        self.converted = converted
        self._special = options.special
        self._tokenizer = tokenizer
        self.prompt: RenderedPrompt = render_prompt(conversation, version, options.special)

    def ids(self) -> list[int]:
        """Ids of the prompt."""
        assert self._tokenizer is not None
        return list(self._tokenizer.encode_prompt(self.prompt))

    def image_tokens(self) -> list[int]:
        """Tokens of every image. Raises InvalidRequest for one that is not here."""
        from headrace.recipe.images.preprocess import image_tokens

        for image in self.prompt.images:
            if image.url is not None:
                raise InvalidRequest(
                    f"The size of {image.url[:80]} is not known here: send the image as a data URL."
                )
        return image_tokens(self.prompt.images)

    def shown(self) -> dict[str, Any]:
        """Everything that is known of it, for --json."""
        from headrace.recipe.conversation_json import (
            conversation_to_json,
            image_to_json,
            inference_to_json,
            parsing_to_json,
        )

        shown: dict[str, Any] = {
            "prompt": self.prompt.text,
            "special_ranges": self.prompt.special_ranges(),
            "images": [image_to_json(image) for image in self.prompt.images],
            "model_version": str(self.version),
            "conversation": conversation_to_json(self.conversation, self._special.image),
        }
        if self.converted is not None:
            shown |= {
                "protocol": str(self.converted.protocol),
                "model": self.converted.model,
                "stream": self.converted.stream,
                "inference": inference_to_json(self.converted.inference),
                "parsing": parsing_to_json(self.converted.parsing),
            }
        return shown


def _read(
    file: Path | None,
    protocol: ProtocolFlag | None,
    level: str,
    model_version: str | None,
    tokenizer: Path | None,
    *,
    needs_ids: bool,
) -> _Request:
    from headrace.cli import recipe_input
    from headrace.recipe.options import ModelVersion

    given = recipe_input.given_request(recipe_input.read_input(file), protocol)
    encoder = None
    if needs_ids or tokenizer is not None:
        encoder = recipe_input.read_tokenizer(tokenizer)
    options = recipe_input.convert_options(given.body, level, model_version, encoder)
    if given.protocol == "conversation":
        conversation = recipe_input.read_conversation(given.body)
        version = ModelVersion(model_version or "v4.1")
        return _Request(conversation, version, options, encoder, None)
    converted = _converted(given, options)
    return _Request(converted.conversation, converted.version, options, encoder, converted)


def _converted(given: Given, options: ConvertOptions) -> ConvertedRequest:
    from headrace.recipe.options import MODEL_VERSIONS
    from headrace.recipe.protocols.convert import convert

    try:
        return convert(given.protocol, given.body, options)
    except InvalidRequest as error:
        hints = []
        if given.guessed:
            hints.append(f"Read as {given.protocol}; --protocol says otherwise.")
        if "supported API model names" in error.message and set(options.model_versions) == set(
            MODEL_VERSIONS
        ):
            hints.append("--model-version takes any name.")
        raise InvalidRequest(" ".join([error.message, *hints]), param=error.param) from error
