"""The engine's side without a process: back-pressure, frames, the messages themselves."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from dataclasses import MISSING, fields, replace
from pathlib import Path

import numpy as np
import pytest

from headrace import errors
from headrace.config import EngineConfig
from headrace.core.output import FinishReason, TokenChunk, TokenLogprobs
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine import wire
from headrace.engine.host import CommandChannel, EngineHost
from headrace.engine.logprob_rows import LogprobRows
from headrace.engine.outputs import StepOutput
from headrace.engine.stats import EngineStats

DEADLINE_S = 20.0
STATS = EngineStats(**{field.name: 0 for field in fields(EngineStats) if field.default is MISSING})


class CountingEngine:
    """Never idle once it has a request: each step gives 100 tokens."""

    def __init__(self) -> None:
        self.steps = 0
        self.added: list[Request] = []

    def add(self, request: Request) -> int:
        self.added.append(request)
        return 7

    def abort(self, request_id: str) -> None:
        raise AssertionError("nobody aborts here")

    def has_work(self) -> bool:
        return bool(self.added)

    def step(self) -> StepOutput:
        self.steps += 1
        return output_of(100, self.steps)

    def stats(self) -> EngineStats:
        return STATS


CHUNKS = (
    TokenChunk("a", 0, (1,)),
    TokenChunk("b", 3, (2**31 - 1,), FinishReason.STOP, choice=2, stop="end", stop_cut=5),
    TokenChunk("c", 9, (), FinishReason.ERROR, "bad", "internal_error"),
)


def output_of(requests: int, index: int) -> StepOutput:
    """A token each of many requests."""
    chunks = [TokenChunk("a", index, (token,)) for token in range(requests)]
    return StepOutput.of_chunks(chunks, range(7, 7 + requests))


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += connection.recv(count - len(data))
    return data


def receive(connection: socket.socket) -> wire.Event:
    header = receive_exactly(connection, wire.HEADER_BYTES)
    return wire.decode_event(receive_exactly(connection, wire.body_length(header)))


def test_a_parent_that_does_not_read_stops_the_engine_and_loses_nothing() -> None:
    parent, child = socket.socketpair()
    parent.settimeout(DEADLINE_S)
    engine = CountingEngine()
    ended: list[BaseException | None] = []

    def host() -> None:
        try:
            channel = CommandChannel(child, send_timeout_s=DEADLINE_S)
            EngineHost(engine, channel, heartbeat_s=1.0, step_warning_s=10.0).run()
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=host, daemon=True)
    with parent, child:
        thread.start()
        parent.sendall(wire.encode_frame(wire.Submit(Request("a", (1,), SamplingParams()))))
        stalled = -1
        deadline_s = time.monotonic() + DEADLINE_S
        while engine.steps != stalled or stalled <= 0:
            assert time.monotonic() < deadline_s
            stalled = engine.steps
            time.sleep(0.2)
        assert receive(parent) == wire.Accepted("a", 7)
        steps = 0
        while steps < stalled + 50:
            event = receive(parent)
            if isinstance(event, wire.Outputs):
                steps += 1
                output = wire.unpack_output(event, {})
                assert output.index.tolist() == [steps] * 100
                assert output.tokens.tolist() == list(range(100))
        parent.sendall(wire.encode_frame(wire.Shutdown()))
        while thread.is_alive():
            try:
                parent.recv(2**16)
            except TimeoutError:
                break
            thread.join(0.001)
    assert ended == [None]


def test_sending_to_a_parent_that_never_reads_has_a_deadline() -> None:
    parent, child = socket.socketpair()
    with parent, child:
        channel = CommandChannel(child, send_timeout_s=0.2)
        with pytest.raises(wire.BrokenChannel, match="read nothing"):
            for _ in range(10_000):
                channel.send(wire.pack_output(output_of(100, 0)))


def test_commands_arrive_whole_and_a_limited_number_at_a_time() -> None:
    parent, child = socket.socketpair()
    with parent, child:
        channel = CommandChannel(child)
        frames = b"".join(wire.encode_frame(wire.Abort(f"r{i}")) for i in range(100))
        parent.sendall(frames[:5])
        assert channel.poll(0.0) == []
        parent.sendall(frames[5:])
        first = channel.poll(1.0, limit=64)
        assert first == [wire.Abort(f"r{i}") for i in range(64)]
        assert channel.poll(0.0, limit=64) == [wire.Abort(f"r{i}") for i in range(64, 100)]
        parent.close()
        with pytest.raises(wire.BrokenChannel):
            channel.poll(1.0)


@pytest.mark.parametrize(
    "message",
    [
        wire.Start("m:f", "/model", EngineConfig(seed=2**64 - 1), ("/tests",), 0.5, 1.0, 2.0),
        wire.Submit(Request("a", (0, 1, 2**31 - 1), SamplingParams(stop_token_ids=(1, 2)))),
        wire.Abort("a"),
        wire.Shutdown(),
    ],
)
def test_commands_survive_the_wire(message: wire.Command) -> None:
    assert wire.decode_command(wire.encode_frame(message)[wire.HEADER_BYTES :]) == message


@pytest.mark.parametrize(
    "message",
    [
        wire.Progress(1, 2**40),
        wire.Ready(
            wire.EngineInfo(
                model_name="m",
                architecture="A",
                dtype="float32",
                vocab_size=1,
                max_model_len=2,
                eos_token_id=0,
                load_time_s=0.5,
            )
        ),
        wire.Accepted("a", 2**40),
        wire.pack_output(StepOutput.of_chunks(CHUNKS, [3, 4, 2**40])),
        wire.Refused("a", "overloaded", "full", None, 1.0),
        wire.Failed("invalid_checkpoint", "damaged", "weights"),
        wire.StatsReply(STATS),
    ],
)
def test_events_survive_the_wire(message: wire.Event) -> None:
    assert wire.decode_event(wire.encode_frame(message)[wire.HEADER_BYTES :]) == message


def test_outputs_are_unpacked_as_they_were() -> None:
    output = StepOutput.of_chunks(CHUNKS, [3, 4, 2**40])
    rows = np.array([0, 1])
    output.logprobs = LogprobRows(
        rows, np.array([-0.5, -1.0]), np.array([[4, 5], [6, 0]]), np.ones((2, 2)), np.array([2, 1])
    )
    output.prompt_logprobs = {0: (None, TokenLogprobs(-2.0, (1,), (-1.5,)))}
    event = wire.decode_event(wire.encode_frame(wire.pack_output(output))[wire.HEADER_BYTES :])
    assert isinstance(event, wire.Outputs)
    back = wire.unpack_output(event, {3: ("a", 0), 4: ("b", 2), 2**40: ("c", 0)})
    assert back.numbers.tolist() == [3, 4, 2**40]
    assert list(back.chunks()) == list(output.chunks())
    first, second, third = back.chunks()
    assert first.logprobs == (TokenLogprobs(-0.5, (4, 5), (1.0, 1.0)),)
    assert first.prompt_logprobs == (None, TokenLogprobs(-2.0, (1,), (-1.5,)))
    assert second.logprobs == (TokenLogprobs(-1.0, (6,), (1.0,)),)
    assert replace(second, logprobs=None) == CHUNKS[1] and third == CHUNKS[2]
    assert back.special_entries() == {0, 1, 2}


def test_damaged_bytes_are_a_broken_channel() -> None:
    with pytest.raises(wire.BrokenChannel):
        wire.decode_command(b"\xc1")
    with pytest.raises(wire.BrokenChannel):
        wire.decode_event(wire.encode_frame(wire.Abort("a"))[wire.HEADER_BYTES :])
    with pytest.raises(wire.BrokenChannel):
        wire.body_length(b"\xff\xff\xff\xff")


def test_a_request_larger_than_a_frame_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 1000)
    request = Request("a", tuple(range(1000)), SamplingParams())
    with pytest.raises(errors.InvalidRequest, match="at most 1000"):
        wire.encode_frame(wire.Submit(request))


@pytest.mark.parametrize(
    "cls", [errors.InvalidRequest, errors.ContextTooLong, errors.Overloaded, errors.CheckpointError]
)
def test_errors_come_back_as_their_class(cls: type[errors.HeadraceError]) -> None:
    error = errors.rebuild_error(cls.code, "text", "field", 2.0)
    assert type(error) is cls
    assert (error.message, error.param, error.retry_after_s) == ("text", "field", 2.0)
    assert type(errors.rebuild_error("unheard_of", "text")) is errors.HeadraceError


def test_error_codes_name_one_class_each() -> None:
    codes = [
        value.code
        for value in vars(errors).values()
        if isinstance(value, type) and "code" in vars(value)
    ]
    assert len(codes) > 10
    assert len(set(codes)) == len(codes)


def test_the_servers_side_imports_no_torch() -> None:
    # Torch would cost the server seconds and 200 MB for nothing.
    code = "import sys, headrace.engine.process; sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
