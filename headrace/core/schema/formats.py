"""String formats of JSON Schema as regular expressions.

Contract: `format_pattern` gives an expression that describes the whole string; a string has the
format exactly if it matches and is not longer than MAX_LENGTHS says. The rules are those
of the RFCs that JSON Schema 2020-12 names for each format (RFC 3339 dates and times, 1123 host
names, 4291 IPv6, 3986 URIs, 6901 pointers), but for `email` and `hostname`, which are narrower.
Read by `schema.py`.
"""

from __future__ import annotations

from functools import lru_cache

from headrace.core.schema.regex import normal_regex

# What 2020-12 defines and nobody here checks.
UNCHECKED = ("idn-email", "idn-hostname", "iri", "iri-reference", "regex", "uri-template")

_DATE = (
    r"(?:\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
    # 29 February: the year is divisible by 4, and by 400 if by 100.
    r"|(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_HOUR, _SIXTY = r"(?:[01]\d|2[0-3])", r"[0-5]\d"
_OFFSET = rf"(?:[Zz]|[+-]{_HOUR}:{_SIXTY})"
_DIGITS = r"(?:\.\d+)?"
# Second 60 is 23:59 in UTC; with another offset it is left out, since which minute of which hour
# that is would take an expression that lists all of them.
_TIME = rf"(?:{_HOUR}:{_SIXTY}:{_SIXTY}{_DIGITS}{_OFFSET}|23:59:60{_DIGITS}(?:[Zz]|[+-]00:00))"
_DURATION = (
    r"P(?:(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)(?:T(?:\d+H(?:\d+M(?:\d+S)?)?"
    r"|\d+M(?:\d+S)?|\d+S))?|T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)|\d+W)"
)
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_H16 = r"[0-9A-Fa-f]{1,4}"
_LS32 = rf"(?:{_H16}:{_H16}|{_IPV4})"
_IPV6 = (
    "(?:"
    + "|".join(
        (
            rf"(?:{_H16}:){{6}}{_LS32}",
            rf"::(?:{_H16}:){{5}}{_LS32}",
            *(
                rf"(?:(?:{_H16}:){{0,{before}}}{_H16})?::(?:{_H16}:){{{4 - before}}}{_LS32}"
                for before in range(5)
            ),
            rf"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}",
            rf"(?:(?:{_H16}:){{0,6}}{_H16})?::",
        )
    )
    + ")"
)
# At most 63 characters. No hyphens in a row: `ab--` begins a name of another script, whose rest no
# grammar can check.
_LABEL = r"(?:[A-Za-z0-9]{1,63}|[A-Za-z0-9](?:-?[A-Za-z0-9]){0,31})"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
# Addresses that every common validator takes, not all that RFC 5321 has: some refuse rare signs,
# quoted names, addresses of machines, and hyphens in a row (see above).
# At most 64 characters in front of the @ and 253 behind it: both hold by the numbers and lengths of
# parts. A length of the whole as well would be too much to be combined with a pattern.
_WORD = r"[A-Za-z0-9_+-]"
_LOCAL = (
    rf"(?:{_WORD}{{1,64}}|{_WORD}{{1,20}}(?:[.']{_WORD}{{1,20}}){{1,2}}"
    rf"|{_WORD}{{1,12}}(?:[.']{_WORD}{{1,12}}){{3,4}})"
)
_EMAIL = rf"{_LOCAL}@(?:[A-Za-z0-9](?:-?[A-Za-z0-9]){{0,27}}\.){{1,4}}[A-Za-z]{{2,24}}"
_PCT = r"%[0-9A-Fa-f]{2}"
_UNRESERVED = r"-A-Za-z0-9._~!$&'()*+,;="
_PCHAR = rf"(?:[{_UNRESERVED}:@]|{_PCT})"
_FRAGMENT = rf"(?:[{_UNRESERVED}:@/?]|{_PCT})*"
_TAIL = rf"(?:\?{_FRAGMENT})?(?:#{_FRAGMENT})?"
_AUTHORITY = (
    rf"(?:(?:[{_UNRESERVED}:]|{_PCT})*@)?"
    rf"(?:\[(?:{_IPV6}|[vV][0-9A-Fa-f]+\.[{_UNRESERVED}:]+)\]|(?:[{_UNRESERVED}]|{_PCT})*)(?::\d*)?"
)
_SEGMENTS = rf"(?:/{_PCHAR}*)*"
_ABSOLUTE = rf"/(?:{_PCHAR}+{_SEGMENTS})?"
_NO_COLON = rf"(?:[{_UNRESERVED}@]|{_PCT})+"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_AUTHORITY}{_SEGMENTS}|{_ABSOLUTE}|{_PCHAR}+{_SEGMENTS}|)"
    rf"{_TAIL}"
)
_RELATIVE = rf"(?://{_AUTHORITY}{_SEGMENTS}|{_ABSOLUTE}|{_NO_COLON}{_SEGMENTS}|){_TAIL}"
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"

_FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": _DURATION,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "hostname": _HOST,
    "email": _EMAIL,
    "uri": _URI,
    "uri-reference": f"(?:{_URI}|{_RELATIVE})",
    "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]\d*)(?:#|{_POINTER})",
}
KNOWN = frozenset(_FORMATS)
# Characters at most, where the expression does not say it.
MAX_LENGTHS = {"hostname": 253}


@lru_cache(maxsize=len(_FORMATS))
def format_pattern(name: str) -> str:
    """A plain expression for the whole string, of a format in KNOWN."""
    return normal_regex(_FORMATS[name], whole=True)
