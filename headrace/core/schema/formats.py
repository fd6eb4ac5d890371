"""String formats of JSON Schema as regular expressions.

Contract: `format_patterns` gives expressions that describe the whole string; a string has the
format exactly if all of them match. The rules are those of the RFCs that JSON Schema 2020-12 names
for each format (RFC 3339 dates and times, 5321 addresses, 1123 host names, 4291 IPv6, 3986 URIs,
6901 pointers). Read by `schema.py`.
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
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATEXT = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_QTEXT = r"[\x20-\x21\x23-\x5b\x5d-\x7e]"
# At most 64 characters in front of the @ and 253 behind it. Both limits hold by the numbers of
# parts: long names with many parts are left out, since counting both would take an automaton that
# the backend cannot build.
_LOCAL = (
    rf'(?:{_ATEXT}{{1,64}}|{_ATEXT}(?:\.?{_ATEXT}){{0,31}}|"(?:{_QTEXT}|\\[\x20-\x7e]){{0,31}}")'
)
_SHORT = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
_DOMAIN = rf"(?:{_SHORT}(?:\.{_SHORT}){{0,6}}|{_LABEL}(?:\.{_LABEL}){{0,2}})"
_EMAIL = rf"{_LOCAL}@(?:{_DOMAIN}|\[(?:{_IPV4}|IPv6:{_IPV6})\])"
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

_FORMATS: dict[str, tuple[str, ...]] = {
    "date": (_DATE,),
    "time": (_TIME,),
    "date-time": (f"{_DATE}[Tt]{_TIME}",),
    "duration": (_DURATION,),
    "ipv4": (_IPV4,),
    "ipv6": (_IPV6,),
    "hostname": (_HOST, r"[\s\S]{0,253}"),
    "email": (_EMAIL,),
    "uri": (_URI,),
    "uri-reference": (f"(?:{_URI}|{_RELATIVE})",),
    "uuid": (r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",),
    "json-pointer": (_POINTER,),
    "relative-json-pointer": (rf"(?:0|[1-9]\d*)(?:#|{_POINTER})",),
}
KNOWN = frozenset(_FORMATS)


@lru_cache(maxsize=len(_FORMATS))
def format_patterns(name: str) -> tuple[str, ...]:
    """Plain expressions, each for the whole string; () when nobody knows the format."""
    return tuple(normal_regex(text, whole=True) for text in _FORMATS.get(name, ()))
