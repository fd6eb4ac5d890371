"""Where settings come from: command line over environment over TOML file over defaults.

Contract: `read_settings` merges the sources into one document of sections, `build_section` turns a
section into its frozen dataclass; unknown names and wrong types are refused with the dotted name
and, where one is close, the name that was probably meant. This is the only module of headrace that
reads the environment; `ENVIRONMENT` lists every variable. Called by the command line.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.errors import ConfigError

Settings = dict[str, dict[str, object]]
Section = TypeVar("Section")

MAX_CONFIG_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class EnvironmentVariable:
    """One variable and what it sets; `field` is a dotted setting, None for the file's path."""

    name: str
    field: str | None
    meaning: str


VARIABLE_PREFIX = "HEADRACE_"
CONFIG_PATH_VARIABLE = "HEADRACE_CONFIG"

# Secrets do not belong on a command line, the path of the file cannot be in the file; all other
# settings have a flag and a place in the file.
ENVIRONMENT: tuple[EnvironmentVariable, ...] = (
    EnvironmentVariable(CONFIG_PATH_VARIABLE, None, "path of the TOML file"),
    EnvironmentVariable("HEADRACE_API_KEYS", "server.api_keys", "API keys, separated by commas"),
)


def read_settings(
    path: Path | None = None,
    *,
    overrides: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Merge file, environment and `overrides` (dotted name -> value; None = not given).

    path: None takes the one of HEADRACE_CONFIG, else no file. environ: os.environ by default.
    Raises ConfigError for an unreadable or malformed file and for values outside a section.
    """
    environ = os.environ if environ is None else environ
    if path is None and environ.get(CONFIG_PATH_VARIABLE):
        path = Path(environ[CONFIG_PATH_VARIABLE])
    settings = read_toml(path) if path is not None else {}
    for variable in ENVIRONMENT:
        text = environ.get(variable.name)
        if variable.field is not None and text is not None:
            parts = [part.strip() for part in text.split(",") if part.strip()]
            if not parts:
                # An empty list of keys would silently open the server to everybody.
                raise ConfigError(
                    f"{variable.name} is set but holds nothing ({variable.field}); unset it, or "
                    f"give {variable.meaning}.",
                    param=variable.field,
                )
            _put(settings, variable.field, parts)
    for name, value in (overrides or {}).items():
        if value is not None:
            _put(settings, name, value)
    return settings


def read_toml(path: Path) -> Settings:
    """Sections of a TOML file. Raises ConfigError naming the file and, for bad syntax, the line."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror}.") from error
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"config file {path} is larger than {MAX_CONFIG_BYTES} bytes.")
    try:
        document = tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path} is not UTF-8 (byte {error.start}).") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}.") from error
    settings: Settings = {}
    for name, section in document.items():
        if not isinstance(section, dict):
            raise ConfigError(
                f"{name} in {path} lies outside a section; settings live in sections such as "
                "[engine] (written once, in single brackets).",
                param=name,
            )
        settings[name] = section
    return settings


def build_section(cls: type[Section], name: str, settings: Mapping[str, object]) -> Section:
    """The section `name` of `settings` as dataclass `cls`; a missing section gives the defaults.

    Raises ConfigError naming the dotted field.
    """
    section = settings.get(name, {})
    if not isinstance(section, Mapping):
        raise ConfigError(f"[{name}] must be a section, got {section!r}.", param=name)
    # cls is a dataclass; Python has no type that says so.
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    for key in section:
        if key not in known:
            raise ConfigError(
                f"{name}.{key} is no setting.{suggestion(key, known)}", param=f"{name}.{key}"
            )
    try:
        return msgspec.convert(dict(section), cls, strict=True)
    except msgspec.ValidationError as error:
        # "Expected `int`, got `str` - at `$.max_num_seqs`": the path becomes the dotted name.
        text, _, where = str(error).partition(" - at `$.")
        field = f"{name}.{where.rstrip('`')}" if where else name
        raise ConfigError(f"{field}: {text}.", param=field) from error


def check_sections(settings: Mapping[str, object], known: Iterable[str]) -> None:
    """Refuse sections that nobody reads, naming the one that was probably meant."""
    names = list(known)
    for section in settings:
        if section not in names:
            raise ConfigError(
                f"[{section}] is no section of the config file.{suggestion(section, names)}",
                param=section,
            )


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """One warning for each variable HEADRACE_* that nobody reads: it is probably mistyped."""
    known = [variable.name for variable in ENVIRONMENT]
    return [
        f"{name} is no variable of headrace and is ignored. Known: {', '.join(known)}."
        for name in sorted(os.environ if environ is None else environ)
        if name.startswith(VARIABLE_PREFIX) and name not in known
    ]


@contextmanager
def naming_flags(flags: Mapping[str, str]) -> Iterator[None]:
    """Make a ConfigError about a setting name the flag that set it (dotted name -> flag)."""
    try:
        yield
    except ConfigError as error:
        message = error.message
        for name, flag in flags.items():
            message = re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", f"{flag} ({name})", message)
        if message == error.message:
            raise
        raise type(error)(message, param=error.param) from error


def flags_of(
    overrides: Mapping[str, object], renamed: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The flags of the `overrides` that were given; `renamed`: not called as their setting."""
    names = {name: "--" + name.partition(".")[2].replace("_", "-") for name in overrides}
    names.update(renamed or {})
    return {name: names[name] for name, value in overrides.items() if value is not None}


def suggestion(name: str, known: Iterable[str]) -> str:
    """' Did you mean x?' if a known name is close, else ' Known: ...'."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {close[0]}?" if close else f" Known: {', '.join(names)}."


def _put(settings: Settings, dotted: str, value: object) -> None:
    section, _, key = dotted.partition(".")
    if not key:
        raise ConfigError(f"{dotted!r} is no dotted setting such as engine.seed.", param=dotted)
    settings.setdefault(section, {})[key] = value
