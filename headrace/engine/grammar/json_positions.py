"""Where in a JSON text an answer is, without what no longer matters.

Contract: a `Position` is an immutable key: two texts with equal positions go on alike under the
grammar of the schema. What is complete is forgotten (a member's value, the items of an array but
their number), and so is the inside of an unconstrained string; whatever the schema does not make
plain (`json_schema_shape.py`) is kept byte by byte. `advance` goes on by the bytes of a token.
Used by `states.py`; called once for each new pair of state and token.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.engine.grammar.json_schema_shape import OPAQUE, Kind, Shape

_SPACE = b" \t\n\r"
_DIGITS = b"0123456789"


class _Frame(NamedTuple):
    """An open object or array.

    shape: of it. done: the last listed name of an object (None: none yet), items of an array.
    extra: an object has additional members.
    """

    shape: Shape
    done: bytes | int | None
    extra: bool = False


class Position(NamedTuple):
    """A place in a text.

    place: what comes next or is open. shape: of the open value, or of the one to come. tail: bytes
    since `place` began, as far as they matter. length: characters of an open MEASURED string, -1:
    `tail` has them. depth, quoted: nesting of an open opaque value, and whether in a string.
    """

    frames: tuple[_Frame, ...]
    place: str
    shape: Shape
    tail: bytes = b""
    length: int = 0
    depth: int = 0
    quoted: bool = False


def start(shape: Shape) -> Position:
    """The beginning of an answer."""
    return Position((), "value", shape)


def advance(position: Position, data: bytes) -> Position | None:
    """The position after `data`, which the grammar allowed; None: after no JSON text."""
    for byte in data:
        step = _STEPS[position.place]
        after = step(position, byte)
        if after is None:
            return None
        position = after
    return position


def _value(at: Position, byte: int) -> Position | None:
    """A value is due; in an array its end may be instead."""
    if byte in _SPACE:
        return at._replace(tail=at.tail + bytes((byte,)))
    if byte == ord("]"):
        return _close(at)
    kind = at.shape.kind
    if kind is Kind.OPAQUE:
        return _opaque(at._replace(place="opaque", tail=b""), byte)
    if kind is Kind.OBJECT:
        frame = _Frame(at.shape, None)
        return Position((*at.frames, frame), "name", OPAQUE) if byte == ord("{") else None
    if kind is Kind.ARRAY:
        frame = _Frame(at.shape, 0)
        return _item((*at.frames, frame)) if byte == ord("[") else None
    if kind in (Kind.STRING, Kind.MEASURED):
        return Position(at.frames, "string", at.shape) if byte == ord('"') else None
    place = "fixed" if byte == ord('"') else "bare"
    return _bare(Position(at.frames, place, at.shape), byte)


def _item(frames: tuple[_Frame, ...]) -> Position | None:
    """The next item of the innermost array is due."""
    shape, done = frames[-1].shape, frames[-1].done
    if not isinstance(done, int):
        return None
    item = shape.first[done] if done < len(shape.first) else shape.items
    return Position(frames, "value", OPAQUE if item is None else item)


def _name(at: Position, byte: int) -> Position | None:
    """A member's name is due or open, or the object ends; `tail` has the name from its quote on."""
    if byte == ord("}") and not at.tail.lstrip(_SPACE):
        return _close(at)
    tail = at.tail + bytes((byte,))
    name = tail.lstrip(_SPACE)
    if byte != ord('"') or len(name) == 1:
        return at._replace(tail=name or tail)
    if b"\\" in name:
        # The quote may be escaped, the name may be a listed one in another spelling.
        return None
    return at._replace(place="colon", tail=name)


def _colon(at: Position, byte: int) -> Position | None:
    """A name is complete."""
    if byte in _SPACE:
        return at._replace(tail=at.tail + bytes((byte,)))
    if byte != ord(":"):
        return None
    frame = at.frames[-1]
    name = at.tail.rstrip(_SPACE)[1:-1]
    members = frame.shape.members or {}
    if name in members:
        frame, shape = frame._replace(done=name), members[name]
    else:
        frame, shape = frame._replace(extra=True), frame.shape.others or OPAQUE
    return Position((*at.frames[:-1], frame), "value", shape)


def _string(at: Position, byte: int) -> Position | None:
    """An unconstrained or measured string is open."""
    measured = at.shape.kind is Kind.MEASURED
    tail = at.tail + bytes((byte,))
    if measured and at.length < 0:  # kept byte by byte since its first escape
        closed = byte == ord('"') and _escapes_end(at.tail)
        return _after(at.frames) if closed else at._replace(tail=tail)
    if at.tail.startswith(b"\\"):
        ended = len(tail) == (6 if tail[1:2] == b"u" else 2)
        return at._replace(tail=b"" if ended else tail)
    if byte == ord("\\"):
        # Lengths count an escape as the library pleases.
        return (
            at._replace(tail=b"%d:" % at.length + tail, length=-1)
            if measured
            else (at._replace(tail=tail))
        )
    if byte == ord('"'):
        return _after(at.frames)
    if len(tail) < _character_bytes(tail[0]):
        return at._replace(tail=tail)
    return at._replace(tail=b"", length=at.length + measured)


def _fixed(at: Position, byte: int) -> Position | None:
    """A constrained string is open."""
    if byte == ord('"') and _escapes_end(at.tail):
        return _after(at.frames)
    return at._replace(tail=at.tail + bytes((byte,)))


def _bare(at: Position, byte: int) -> Position | None:
    """A number or literal is open; what follows it ends it."""
    if byte in b",]}" or byte in _SPACE:
        return _next(_after(at.frames), byte)
    tail = at.tail + bytes((byte,))
    if at.shape.kind is Kind.NUMBER and byte in _DIGITS and at.tail and at.tail[-1] in _DIGITS:
        # 12 goes on like 1, but 0 unlike 10, except behind a point.
        tail = at.tail
    elif at.shape.kind is Kind.NUMBER and byte in _DIGITS:
        first_of_integer = not set(b".eE") & set(at.tail)
        tail = at.tail + (b"0" if byte == ord("0") and first_of_integer else b"1")
    return at._replace(tail=tail)


def _opaque(at: Position, byte: int) -> Position | None:
    """A value of unknown shape is open: all its bytes are kept until it is complete."""
    tail, depth = at.tail + bytes((byte,)), at.depth
    if at.quoted:
        quoted = not (byte == ord('"') and _escapes_end(at.tail))
        ended = not quoted and depth == 0
    elif depth == 0 and at.tail and (byte in b",]}" or byte in _SPACE):
        return _next(_after(at.frames), byte)
    else:
        quoted = byte == ord('"')
        depth += (byte in b"[{") - (byte in b"]}")
        ended = byte in b"]}" and depth == 0
    if ended:
        return _after(at.frames)
    return at._replace(tail=tail, depth=depth, quoted=quoted)


def _after(frames: tuple[_Frame, ...]) -> Position:
    """A value is complete."""
    done = frames[-1].done if frames else None
    if isinstance(done, int):
        counted = frames[-1].shape.counted
        done = done + 1 if counted < 0 else min(done + 1, counted)
        frames = (*frames[:-1], frames[-1]._replace(done=done))
    return Position(frames, "after", OPAQUE)


def _next(at: Position, byte: int) -> Position | None:
    """A value is complete: a comma, the end of its container, or space follows."""
    if byte in _SPACE:
        return at._replace(tail=at.tail + bytes((byte,)))
    if not at.frames:
        return None
    if byte == ord(","):
        if isinstance(at.frames[-1].done, int):
            return _item(at.frames)
        return Position(at.frames, "name", OPAQUE)
    return _close(at) if byte in b"]}" else None


def _close(at: Position) -> Position | None:
    """The innermost container is complete."""
    return _after(at.frames[:-1]) if at.frames else None


def _escapes_end(before: bytes) -> bool:
    """Whether a quote after `before` is not escaped."""
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 0


def _character_bytes(lead: int) -> int:
    """Bytes of a UTF-8 character by its first one."""
    return 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4


_STEPS = {
    "value": _value,
    "name": _name,
    "colon": _colon,
    "string": _string,
    "fixed": _fixed,
    "bare": _bare,
    "opaque": _opaque,
    "after": _next,
}
