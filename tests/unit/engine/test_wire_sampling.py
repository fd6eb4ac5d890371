"""Sampling parameters and log probabilities between server and engine process."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from headrace.core.grammar import GrammarKind, GrammarSpec
from headrace.core.request import Request
from headrace.core.sampling import Coupling, LogprobsMode, SamplingParams, StopScope
from headrace.engine import wire
from headrace.engine.host import CommandChannel, EngineHost
from headrace.errors import InvalidRequest
from tests.unit.engine.test_process_host import CountingEngine, receive

EVERYTHING = SamplingParams(
    temperature=0.3,
    speculation="fixed:2",
    top_p=0.4,
    top_k=5,
    seed=2**64 - 1,
    max_tokens=70,
    stop_token_ids=(8, 9),
    ignore_eos=True,
    min_p=0.1,
    n=3,
    min_tokens=4,
    stop=("a", "é\n"),
    stop_scope=StopScope(7, after_border=True, skip_newlines=True),
    repetition_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=0.5,
    logit_bias={0: -100.0, 2**31 - 1: 1.5},
    banned_token_ids=(3,),
    allowed_token_ids=(4, 5),
    logprobs=6,
    logprobs_mode=LogprobsMode.PROCESSED,
    prompt_logprobs=2,
    coupling=Coupling.MAXIMAL,
    grammar=GrammarSpec(
        GrammarKind.REGEX, "a+", (5, 6), bound_token_id=7, required=False, checked=True
    ),
)


def test_every_field_crosses() -> None:
    request = Request("r", (1, 2), EVERYTHING, priority=-3)
    frame = wire.encode_frame(wire.Submit(request))
    assert wire.decode_command(frame[wire.HEADER_BYTES :]) == wire.Submit(request)
    defaults = Request("r", (1,), SamplingParams())
    assert all(
        getattr(EVERYTHING, name) != getattr(defaults.sampling, name)
        for name in SamplingParams.__slots__
    )


@pytest.mark.parametrize(
    ("fields", "prompt_length", "param"),
    [
        ({"logprobs": 256}, 1, None),
        ({"logprobs": 257}, 1, "logprobs"),
        ({"prompt_logprobs": 3}, 2**16, None),
        ({"prompt_logprobs": 3}, 2**16 + 1, "prompt_logprobs"),
        ({"prompt_logprobs": 0}, 2**18 + 1, "prompt_logprobs"),
    ],
)
def test_more_log_probabilities_than_frames_carry_are_refused(
    fields: dict[str, Any], prompt_length: int, param: str | None
) -> None:
    request = Request("r", (1,) * prompt_length, SamplingParams(**fields))
    if param is None:
        wire.check_answer_fits(request)
        return
    with pytest.raises(InvalidRequest) as caught:
        wire.check_answer_fits(request)
    assert caught.value.param == param


def test_the_host_refuses_them_before_the_engine_sees_them() -> None:
    ours, theirs = socket.socketpair()
    engine = CountingEngine()
    host = EngineHost(engine, CommandChannel(theirs), heartbeat_s=60.0, step_warning_s=10.0)
    thread = threading.Thread(target=host.run)
    thread.start()
    ours.settimeout(20)
    ours.sendall(wire.encode_frame(wire.Submit(Request("r", (1,), SamplingParams(logprobs=500)))))
    events = [receive(ours) for _ in range(2)]
    (refused,) = [event for event in events if isinstance(event, wire.Refused)]
    assert (refused.request_id, refused.param) == ("r", "logprobs")
    assert engine.added == []
    ours.sendall(wire.encode_frame(wire.Shutdown()))
    thread.join(20)
    assert not thread.is_alive()
    ours.close()
    theirs.close()
