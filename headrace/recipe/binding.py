"""Start-up check that a tokenizer and a checkpoint's config fit the prompt format.

Contract: `bind` returns the spellings to use, or raises one CheckpointError that lists everything
that is missing, before any weight is loaded. Nothing here (nor anywhere else in the codec) knows a
control token by number: spellings come from `SpecialTokens`, ids from config.json.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.files import CONFIG_FILE, MAX_CONFIG_BYTES, read_regular
from headrace.errors import CheckpointError, ModelConfigError
from headrace.recipe.constants import CHECKPOINT_IMAGE_SPELLING, SpecialTokens
from headrace.recipe.options import ModelVersion
from headrace.recipe.tokenizer import Tokenizer

# `model_type` of config.json; what else it may say is refused by whoever loads the model.
_VERSIONS = {"deepseek_v4": ModelVersion.V4, "deepseek_v41": ModelVersion.V41}


@dataclass(frozen=True, slots=True)
class ConfigTokenIds:
    """The ids that config.json names; `image` and `noise` are None where the model has none.

    vocab_size: ids of the model are below it; None where nobody said. version: the prompt format of
    the model.
    """

    eos: int
    image: int | None
    noise: int | None
    vocab_size: int | None = None
    version: ModelVersion = ModelVersion.V41

    @classmethod
    def from_directory(cls, directory: Path) -> ConfigTokenIds:
        """Read them from config.json (nested or flat); errors name the file and field."""
        path = directory / CONFIG_FILE
        data = read_regular(path, MAX_CONFIG_BYTES)
        try:
            config = msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ModelConfigError(f"{path}: not valid JSON: {error}.") from error
        if not isinstance(config, dict):
            raise ModelConfigError(f"{path}: must hold a JSON object.")
        text_config = config.get("text_config", config)
        if not isinstance(text_config, dict):
            raise ModelConfigError(f"{path}: text_config must be an object.", param="text_config")
        eos = _integer(path, text_config, "eos_token_id")
        if eos is None:
            eos = _integer(path, config, "eos_token_id")
        if eos is None:
            raise ModelConfigError(f"{path}: eos_token_id is missing.", param="eos_token_id")
        return cls(
            eos=eos,
            image=_integer(path, config, "image_token_id"),
            noise=_integer(path, text_config, "dspark_noise_token_id"),
            vocab_size=_integer(path, text_config, "vocab_size"),
            version=_VERSIONS.get(str(config.get("model_type")), ModelVersion.V41),
        )


def _integer(path: Path, config: dict[str, Any], name: str) -> int | None:
    value = config.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelConfigError(
            f"{path}: {name} must be an integer of at least 0, got {repr(value)[:80]}.", param=name
        )
    return value


def bind(
    tokenizer: Tokenizer,
    ids: ConfigTokenIds,
    special: SpecialTokens | None = None,
    version: ModelVersion = ModelVersion.V41,
) -> SpecialTokens:
    """Spellings that fit this checkpoint, or CheckpointError listing all that does not fit.

    Without `special` the defaults are taken, with the checkpoint's image spelling where the
    tokenizer has it. Grounding spellings that the tokenizer lacks stay plain text. V4 prompts need
    no system token. A token whose spelling is empty is left out of prompts and needs no id.
    """
    if special is None:
        special = SpecialTokens()
        if CHECKPOINT_IMAGE_SPELLING in tokenizer.added:
            special = replace(special, image=CHECKPOINT_IMAGE_SPELLING)
    needed = {
        "bos": special.bos,
        "eos": special.eos,
        "thinking start": special.thinking_start,
        "thinking end": special.thinking_end,
        "user": special.user,
        "assistant": special.assistant,
        "dsml": special.dsml,
    }
    if version is not ModelVersion.V4:
        needed["system"] = special.system
    problems = [
        f'the {name} token "{spelling}" is not in the added vocabulary'
        for name, spelling in needed.items()
        if spelling and spelling not in tokenizer.added
    ]
    problems += _id_problems(tokenizer, ids, special)
    if problems:
        raise CheckpointError(
            f"{tokenizer.source} does not fit the {version.upper()} prompt format: "
            f"{'; '.join(problems)}."
        )
    known = tuple(spelling for spelling in special.grounding if spelling in tokenizer.added)
    return replace(special, grounding=known)


def _id_problems(tokenizer: Tokenizer, ids: ConfigTokenIds, special: SpecialTokens) -> list[str]:
    problems: list[str] = []
    if ids.vocab_size is not None and tokenizer.vocab_size > ids.vocab_size:
        problems.append(
            f"it has a token {tokenizer.vocab_size - 1}, config.json says vocab_size "
            f"{ids.vocab_size}"
        )
    eos = tokenizer.added.get(special.eos)
    if eos is not None and eos != ids.eos:
        problems.append(f'"{special.eos}" has id {eos}, config.json says eos_token_id {ids.eos}')
    if ids.noise is not None and not tokenizer.has_id(ids.noise):
        problems.append(f"dspark_noise_token_id {ids.noise} of config.json is not a token")
    if ids.image is not None:
        image = tokenizer.added.get(special.image)
        if image is None:
            problems.append(
                f'the image token "{special.image}" is not in the added vocabulary '
                f"(config.json: image_token_id {ids.image})"
            )
        elif image != ids.image:
            problems.append(
                f'"{special.image}" has id {image}, config.json says image_token_id {ids.image}'
            )
    return problems
