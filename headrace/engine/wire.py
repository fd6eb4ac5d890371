"""Messages between the server process and its engine process.

Contract: one message is one frame, a 4-byte little-endian length followed by MessagePack of a
tagged struct; nothing is ever pickled. Frames travel over an inherited socket pair, so no other
process can read or write them. `Commands` go to the engine, `Events` come back; token chunks are
sent once per engine step, not once per token. Used by `engine/host.py` (the engine's side) and
`engine/child.py` (the server's side); imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from headrace import errors
from headrace.config import EngineConfig
from headrace.core.output import FinishReason, TokenChunk
from headrace.core.request import Request
from headrace.engine.outputs import EngineStats
from headrace.errors import HeadraceError, InvalidRequest

HEADER_BYTES: Final = 4
# A prompt of one million ids takes at most 5 bytes an id; anything larger is a damaged stream.
MAX_FRAME_BYTES: Final = 64 * 2**20


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says about itself once its model is loaded."""

    model_name: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int  # tokens of prompt plus output
    eos_token_id: int
    load_time_s: float


# --- to the engine ---------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, tag="start"):
    """First message: which engine to build.

    factory: "module:function" of an `EngineFactory` (engine/host.py). import_paths: folders added
    to the module search path for it. Times in seconds, see `SupervisionConfig`.
    """

    factory: str
    checkpoint: str
    config: EngineConfig
    import_paths: tuple[str, ...]
    heartbeat_s: float
    step_warning_s: float
    send_timeout_s: float


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Run a request; answered by Chunks or by one Refused."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request now; answered by a last chunk unless the request has already ended."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave at once; running requests are dropped (drain first)."""


Command = Start | Submit | Abort | Shutdown


# --- from the engine -------------------------------------------------------------------------


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Bytes of weights read so far, while the model loads."""

    done_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded; requests may be submitted."""

    info: EngineInfo


class WireChunk(msgspec.Struct, frozen=True, array_like=True):
    """TokenChunk as an array: no field names on the wire."""

    request_id: str
    index: int
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    error: str | None = None
    error_code: str | None = None


class Chunks(msgspec.Struct, frozen=True, tag="chunks"):
    """All new tokens of one engine step."""

    items: list[WireChunk]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The engine does not take a request; the fields are those of the HeadraceError."""

    request_id: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Loading failed or a step raised: the engine process ends after this message."""

    code: str
    message: str
    param: str | None = None


class StatsReply(msgspec.Struct, frozen=True, tag="stats"):
    """Counters of the engine, sent between steps every `heartbeat_s`: also its sign of life."""

    stats: EngineStats


Event = Progress | Ready | Chunks | Refused | Failed | StatsReply

_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


class BrokenChannel(Exception):
    """The other process is gone or sent bytes that are no frame."""


def encode_frame(message: Command | Event) -> bytes:
    """Header and body of a message. Raises InvalidRequest when it exceeds MAX_FRAME_BYTES."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise InvalidRequest(
            f"The request takes {len(body)} bytes, at most {MAX_FRAME_BYTES} are allowed."
        )
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def body_length(header: bytes) -> int:
    """Length of the body in bytes. Raises BrokenChannel when it exceeds MAX_FRAME_BYTES."""
    length = int.from_bytes(header, "little")
    if length > MAX_FRAME_BYTES:
        raise BrokenChannel(f"frame of {length} bytes")
    return length


def decode_command(body: bytes | bytearray | memoryview) -> Command:
    """A message to the engine. Raises BrokenChannel when it is none."""
    try:
        return _command_decoder.decode(body)
    except (msgspec.DecodeError, HeadraceError) as error:
        raise BrokenChannel(f"not a command: {error}") from error


def decode_event(body: bytes | bytearray | memoryview) -> Event:
    """A message from the engine. Raises BrokenChannel when it is none."""
    try:
        return _event_decoder.decode(body)
    except msgspec.DecodeError as error:
        raise BrokenChannel(f"not an event: {error}") from error


def pack_chunks(chunks: Iterable[TokenChunk]) -> Chunks:
    """Chunks of one step as a message."""
    return Chunks(
        [
            WireChunk(
                chunk.request_id,
                chunk.index,
                chunk.tokens,
                chunk.finish,
                chunk.error,
                chunk.error_code,
            )
            for chunk in chunks
        ]
    )


def unpack_chunk(chunk: WireChunk) -> TokenChunk:
    """The chunk as the rest of headrace knows it."""
    return TokenChunk(
        chunk.request_id, chunk.index, chunk.tokens, chunk.finish, chunk.error, chunk.error_code
    )


# Only classes with a code of their own: the others share that of their base.
_CLASS_OF_CODE: Final[dict[str, type[HeadraceError]]] = {
    cls.code: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, HeadraceError) and "code" in vars(cls)
}


def rebuild_error(
    code: str, message: str, param: str | None = None, retry_after_s: float | None = None
) -> HeadraceError:
    """The error that the other process raised, as the same class (unknown code: HeadraceError)."""
    cls = _CLASS_OF_CODE.get(code, HeadraceError)
    return cls(message, param=param, retry_after_s=retry_after_s)
