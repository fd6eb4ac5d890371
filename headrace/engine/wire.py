"""Messages between the server process and its engine process.

Contract: one message is one frame, a 4-byte little-endian length followed by MessagePack of a
tagged struct; nothing is ever pickled. Frames travel over an inherited socket pair, so no other
process can read or write them. `Commands` go to the engine, `Events` come back; token chunks are
sent once per engine step, not once per token. Used by `engine/host.py` (the engine's side) and
`engine/child.py` (the server's side); imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np

from headrace.config import EngineConfig
from headrace.core.output import TokenLogprobs
from headrace.core.request import Request
from headrace.engine.logprob_rows import LogprobRows
from headrace.engine.outputs import StepOutput
from headrace.engine.stats import EngineStats
from headrace.engine.stops import Ended
from headrace.errors import HeadraceError, InvalidRequest

HEADER_BYTES: Final = 4
# A prompt of one million ids takes at most 5 bytes an id; anything larger is a damaged stream.
MAX_FRAME_BYTES: Final = 64 * 2**20
# The log probabilities of a step must fit a frame; in process (`LLM`) the vocabulary is the limit.
MAX_WIRE_LOGPROBS: Final = 256
MAX_WIRE_PROMPT_LOGPROBS: Final = 2**18  # of one prompt, all tokens together


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


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The engine has taken a request; choice i is `number` + i in the outputs that follow."""

    request_id: str
    number: int


class WireLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """`LogprobRows` of a step: the arrays as bytes, little-endian; `width`: best ids per row."""

    width: int
    index: bytes
    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes
    top_counts: bytes


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """All that the requests got in one engine step: a `StepOutput` without names.

    The arrays as bytes, little-endian: int64 numbers, int32 index and tokens, int8 finish.
    """

    numbers: bytes
    index: bytes
    tokens: bytes
    finish: bytes
    errors: dict[int, str] | None = None
    ended: dict[int, Ended] | None = None
    logprobs: WireLogprobs | None = None
    prompt_logprobs: dict[int, tuple[TokenLogprobs | None, ...]] | None = None
    cached: dict[int, int] | None = None
    error_codes: dict[int, str] | None = None
    drafts: dict[int, tuple[int, int]] | None = None


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


Event = Progress | Ready | Accepted | Outputs | Refused | Failed | StatsReply

_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


class BrokenChannel(Exception):
    """The other process is gone or sent bytes that are no frame."""


def check_answer_fits(request: Request) -> None:
    """Raise InvalidRequest for more log probabilities than frames can carry."""
    logprobs, prompt = request.sampling.logprobs, request.sampling.prompt_logprobs
    if logprobs is not None and logprobs > MAX_WIRE_LOGPROBS:
        raise InvalidRequest(
            f"logprobs must be at most {MAX_WIRE_LOGPROBS} here, got {logprobs}.", param="logprobs"
        )
    numbers = len(request.prompt_token_ids) * ((prompt or 0) + 1)
    if prompt is not None and numbers > MAX_WIRE_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs asks for {numbers} numbers, at most {MAX_WIRE_PROMPT_LOGPROBS} are "
            "allowed here.",
            param="prompt_logprobs",
        )


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


def pack_output(output: StepOutput) -> Outputs:
    """What the requests got in one step as a message."""
    rows = output.logprobs
    return Outputs(
        numbers=output.numbers.astype("<i8", copy=False).tobytes(),
        index=output.index.astype("<i4").tobytes(),
        tokens=output.tokens.astype("<i4", copy=False).tobytes(),
        finish=output.finish.tobytes(),
        errors=dict(output.errors) if output.errors else None,
        ended=dict(output.ended) if output.ended else None,
        logprobs=None if rows is None else _pack_logprobs(rows),
        prompt_logprobs=dict(output.prompt_logprobs) if output.prompt_logprobs else None,
        cached=dict(output.cached) if output.cached else None,
        error_codes=dict(output.error_codes) if output.error_codes else None,
        drafts=dict(output.drafts) if output.drafts else None,
    )


def unpack_output(message: Outputs, names: Mapping[int, tuple[str, int]]) -> StepOutput:
    """The output as it was; names: (request id, choice) by number, others are left without one."""
    numbers = np.frombuffer(message.numbers, dtype="<i8")
    return StepOutput(
        numbers=numbers,
        names=[names.get(number, ("", 0)) for number in numbers.tolist()],
        index=np.frombuffer(message.index, dtype="<i4").astype(np.int64),
        tokens=np.frombuffer(message.tokens, dtype="<i4"),
        finish=np.frombuffer(message.finish, dtype=np.int8),
        errors=message.errors,
        ended=message.ended,
        logprobs=None if message.logprobs is None else _unpack_logprobs(message.logprobs),
        prompt_logprobs=message.prompt_logprobs,
        cached=message.cached,
        error_codes=message.error_codes,
        drafts=message.drafts,
    )


def _pack_logprobs(rows: LogprobRows) -> WireLogprobs:
    return WireLogprobs(
        width=rows.top_ids.shape[1],
        index=rows.index.astype("<i8", copy=False).tobytes(),
        logprobs=rows.logprobs.astype("<f8", copy=False).tobytes(),
        top_ids=rows.top_ids.astype("<i8", copy=False).tobytes(),
        top_logprobs=rows.top_logprobs.astype("<f8", copy=False).tobytes(),
        top_counts=rows.top_counts.astype("<i8", copy=False).tobytes(),
    )


def _unpack_logprobs(rows: WireLogprobs) -> LogprobRows:
    index = np.frombuffer(rows.index, dtype="<i8")
    shape = (index.size, rows.width)
    return LogprobRows(
        index=index,
        logprobs=np.frombuffer(rows.logprobs, dtype="<f8"),
        top_ids=np.frombuffer(rows.top_ids, dtype="<i8").reshape(shape),
        top_logprobs=np.frombuffer(rows.top_logprobs, dtype="<f8").reshape(shape),
        top_counts=np.frombuffer(rows.top_counts, dtype="<i8"),
    )
