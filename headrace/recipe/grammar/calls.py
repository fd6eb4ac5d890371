"""Calls of tools -> a Lark grammar of the markup in which the model writes them.

Contract: the text is exactly what the model writes (`render/common.py: CallFormat`), with control
tokens by id. Parameters come in any order, each at most once, all required ones: the rule of a
tool counts them with one bit each, which is as cheap as a fixed order and never forbids the order
that the model has learnt. Written in llguidance's dialect; called by `spec.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from headrace.core.grammar import MAX_JSON_SPACES
from headrace.core.schema.regex import literal_regex
from headrace.core.schema.regex_classes import ANY
from headrace.recipe.grammar.tool_rules import ToolRule, Values
from headrace.recipe.render.common import CallFormat

MAX_COUNTED = 64  # parameters of a tool; of more the order is that of the schema
_JSON_OPTIONS = (
    '{"x-guidance":{"whitespace_pattern":"[ \\n\\r\\t]{1,' + str(MAX_JSON_SPACES) + '}"}'
)
# Of parameters that are named nowhere: nothing that ends the attribute, and no white space.
_NAME = r"[^\x{0}-\x{20}\x{22}\x{3c}\x{3e}\x{5c}\x{7f}-\x{a0}\x{ff5c}\p{Z}]{1,128}"


@dataclass(frozen=True, slots=True)
class Markup:
    """How calls are written. dsml: id of the control token in the tags."""

    format: CallFormat
    dsml: int


class CallGrammar:
    """Rules of the grammar of some tools' calls.

    Names of rules: `opened` is the block behind its first control token, `block` a whole one,
    `inside` what follows its first line.
    """

    def __init__(self, tools: Sequence[ToolRule], markup: Markup, *, parallel: bool) -> None:
        self.lines: list[str] = []
        self._values: dict[Values, str] = {}
        form, token = markup.format, f"<[{markup.dsml}]>"
        self._nothing = _text(form.nothing)
        self._opens = f'"<" {token} ' + _text(f'{form.parameter} name="')
        self._closes = f"{token} " + _text(f"{form.parameter}>\n")
        block, invoke = _text(f"{form.block}>"), _text(f"{form.invoke}>")
        # Of two texts the longer one wins where both fit, so that none may end where the other
        # goes on: the mark of a tag belongs to the line end in front of it.
        more = ' ("\\n<" call)*' if parallel else ""
        opens_call = _text(f'{form.invoke} name="')
        names = " | ".join(f"tool_{number}" for number in range(len(tools)))
        self.lines += (
            f'block: "\\n\\n<" {token} opened',
            f'opened: {block} "\\n" inside',
            f'inside: "<" call{more} "\\n</" {token} {block}',
            f'call: {token} {opens_call} one_call "</" {token} {invoke}',
            f"one_call: {names}",
        )
        for number, tool in enumerate(tools):
            self._tool(tool, f"tool_{number}")

    def _tool(self, tool: ToolRule, rule: str) -> None:
        # Required ones first: then one range of bits says whether all are there.
        parameters = sorted(tool.parameters, key=lambda parameter: not parameter.required)
        required = sum(parameter.required for parameter in parameters)
        texts = [
            self._parameter(f"/{literal_regex(p.name)}/", p.values, f"{tool.name}.{p.name}")
            for p in parameters
        ]
        if tool.extra is not None:
            name = self._extra_name(tool, rule)
            texts.append(self._parameter(name, tool.extra, f"{tool.name}.*"))
        head = f"{rule}: " + _text(f'{tool.name}">\n')
        empty = "" if required else f" | {self._nothing}"
        if not texts:
            self.lines.append(f"{head} {self._nothing}")
        elif len(parameters) > MAX_COUNTED:
            self.lines.append(f"{head} ({self._fixed_order(tool, texts)}{empty})")
        else:
            self.lines.append(f"{head} ({rule}_some::0x0{empty})")
            options = [
                f"{text} {rule}_more::set_bit({bit}) %if bit_clear({bit})"
                for bit, text in enumerate(texts[: len(parameters)])
            ]
            options += (f"{text} {rule}_more::_" for text in texts[len(parameters) :])
            self.lines.append(f"{rule}_some::_: " + "\n  | ".join(options))
            end = f" %if is_ones([0:{required}])" if required else ""
            self.lines.append(f'{rule}_more::_: ""{end}\n  | {rule}_some::_')

    def _fixed_order(self, tool: ToolRule, texts: list[str]) -> str:
        """Parameters in the order of the schema; `texts` has the required ones first."""
        ranked = sorted(tool.parameters, key=lambda parameter: not parameter.required)
        by_name = {entry.name: text for entry, text in zip(ranked, texts, strict=False)}
        items = [
            by_name[entry.name] if entry.required else f"({by_name[entry.name]})?"
            for entry in tool.parameters
        ]
        if tool.extra is not None:
            items.append(f"({texts[-1]})*")
        return " ".join(items)

    def _parameter(self, name: str, values: Values, owner: str) -> str:
        """One parameter with its line end. name: the terminal of its name; owner: for errors."""
        return f"{self._opens} {name} {self._value(values, owner)} {self._closes}"

    def _extra_name(self, tool: ToolRule, rule: str) -> str:
        """A terminal for names that no parameter has."""
        terminal = f"NAME_{rule.upper()}"
        parts = [f"/{_NAME}/"]
        if tool.extra_name is not None:
            parts.append(f"/{tool.extra_name}/")
        if tool.parameters:
            known = "|".join(literal_regex(entry.name) for entry in tool.parameters)
            parts.append(f"~/(?:{known})/")
        self.lines.append(f"{terminal}: {' & '.join(parts)}")
        return terminal

    def _value(self, values: Values, owner: str) -> str:
        """The rule of a value, from the attribute to the `</` behind it.

        owner: tool and parameter that have it first, in a comment in front of its texts.
        """
        rule = self._values.get(values)
        if rule is None:
            rule = self._values[values] = f"value_{len(self._values)}"
            options: list[str] = []
            for number, text in enumerate(values.texts):
                terminal = f"TEXT_{rule.upper()}_{number}"
                expressions = " & ".join(f"/(?:{part})/" for part in text) or f"/{ANY}*/"
                # The text and the mark behind it are one terminal: it ends where a control token
                # comes, whatever marks the text itself holds.
                if len(text) > 1:
                    self.lines.append(f"// {_text(owner)}")
                self.lines.append(f'{terminal}: ({expressions}) "</"')
                options.append(f'"\\" string=\\"true\\">" {terminal}')
            if values.json is not None:
                options.append(f'"\\" string=\\"false\\">" {rule}_json "</"')
                self.lines.append(f"{rule}_json: %json {json_rule(values.json)}")
            self.lines.append(f"{rule}: " + " | ".join(options))
        return rule


def json_rule(schema: str) -> str:
    """A schema for `%json`, with bounded white space."""
    return _JSON_OPTIONS + ("," if schema != "{}" else "") + schema.removeprefix("{")


def _text(text: str) -> str:
    """A literal in Lark."""
    return msgspec.json.encode(text).decode()
