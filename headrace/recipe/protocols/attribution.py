"""The attribution line that Claude Code puts into its system prompt, and how to drop it.

The line (`x-anthropic-billing-header: cc_version=...; cch=...`) changes with every request, so a
prompt that keeps it never hits a prefix cache. The official codec drops it in a few places only;
`ConvertOptions.strip_attribution` asks for all of them. Called by `protocols/{chat,responses,
messages}.py` on the texts of system messages.
"""

from __future__ import annotations

import re

BILLING_HEADER = "x-anthropic-billing-header"

_NEEDLE = re.compile(BILLING_HEADER, re.IGNORECASE | re.ASCII)
# A line ends at its newline, or where the prompt proper begins without one.
_LINE = re.compile(
    rf"^[ \t]*{BILLING_HEADER}(?:(?!You are)[^\n])*+(\n*)", re.IGNORECASE | re.MULTILINE | re.ASCII
)

# White space of Unicode; unlike str.strip() without the information separators.
_WHITE_SPACE = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)


def is_billing_header(text: str) -> bool:
    """Whether a text starts with the line, in any case of its ASCII letters (Messages rule)."""
    return text[: len(BILLING_HEADER)].lower() == BILLING_HEADER


def cut_header(text: str) -> str:
    """A system prompt that starts with the line, without it (rule of Chat Completions)."""
    starts = [start for start in (text.find("\n"), text.find("You are")) if start >= 0]
    return text[min(starts) :].lstrip(_WHITE_SPACE) if starts else ""


def strip_attribution(text: str) -> str:
    """Text without any attribution line, wherever it stands; other text is returned as it is.

    Newlines after a line go with it at the start of the text; elsewhere one newline goes.
    """
    if _NEEDLE.search(text) is None:
        return text

    def left(match: re.Match[str]) -> str:
        return match[1][1:] if match.start() else ""

    return _LINE.sub(left, text)
