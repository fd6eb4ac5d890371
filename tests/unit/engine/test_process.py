"""The engine process: streams, refusals, loss and restart, drain, slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.core.output import FinishReason, TokenChunk
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.process import EngineClient, EngineState, SupervisionConfig
from headrace.errors import (
    CheckpointError,
    ConfigError,
    Draining,
    EngineLost,
    InvalidRequest,
    Overloaded,
)

HERE = str(Path(__file__).parent)
DEADLINE_S = 20.0
REFUSE, CRASH, HANG = 900, 901, 902  # process_factories


def limits(factory: str = "scripted", **changes: object) -> SupervisionConfig:
    values: dict[str, object] = {
        "factory": f"process_factories:{factory}",
        "import_paths": (HERE,),
        "restart_backoff_s": 0.05,
        "heartbeat_s": 0.1,
        "load_timeout_s": DEADLINE_S,
    }
    return SupervisionConfig(**{**values, **changes})  # type: ignore[arg-type]


def request(name: str, first: int, count: int = 5, delay_ms: int = 0) -> Request:
    return Request(name, (first, count, delay_ms), SamplingParams(seed=2**64 - 1))


@contextlib.asynccontextmanager
async def running(
    supervision: SupervisionConfig, config: EngineConfig | None = None
) -> AsyncIterator[EngineClient]:
    client = EngineClient(Path("some/model"), config or EngineConfig(), supervision)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await test()

    asyncio.run(bounded())


async def collect(client: EngineClient, item: Request) -> list[TokenChunk]:
    return [chunk async for chunk in client.submit(item)]


def tokens(chunks: list[TokenChunk]) -> list[int]:
    """Tokens of a stream; its indices must be gapless."""
    result: list[int] = []
    for chunk in chunks:
        assert chunk.index == len(result)
        result += chunk.tokens
    return result


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def process_is_gone(pid: int) -> bool:
    """Whether the process has ended (a zombie that nobody has waited for counts as ended)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    listing = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return listing.stdout.strip().startswith("Z") or not listing.stdout.strip()


def test_streams_tokens_of_many_requests_and_leaves_no_process(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def test() -> None:
        progress: list[tuple[int, int]] = []
        client = EngineClient(Path("some/model"), EngineConfig(), limits())
        with pytest.raises(Overloaded):
            await collect(client, request("early", 1))
        info = await client.start(lambda done, total: progress.append((done, total)))
        assert (info.model_name, info.vocab_size, info.max_model_len) == ("model", 1000, 4096)
        assert progress[0] == (0, 100) and progress[-1] == (100, 100)
        assert client.ready
        pid = client.pid
        assert pid is not None
        answers = await asyncio.gather(
            *(collect(client, request(f"r{i}", 10 * i, count=1 + i)) for i in range(20))
        )
        for i, chunks in enumerate(answers):
            assert tokens(chunks) == list(range(10 * i, 10 * i + 1 + i))
            assert chunks[-1].finish is FinishReason.LENGTH
        await until(lambda: client.stats().steps >= 20)
        assert client.num_requests == 0
        with pytest.raises(ConfigError):
            await client.start()
        await client.close()
        assert process_is_gone(pid)
        assert not client.ready
        with pytest.raises(Draining):
            await collect(client, request("late", 1))

    run(test)
    assert "a library that prints" not in capfd.readouterr().out


def test_a_refusal_is_raised_before_the_first_chunk_as_the_same_error() -> None:
    async def test() -> None:
        async with running(limits(), EngineConfig(max_waiting=1, max_num_seqs=1)) as client:
            with pytest.raises(InvalidRequest) as refused:
                await collect(client, request("a", REFUSE))
            assert refused.value.param == "prompt"
            assert refused.value.message == "token 900 is refused."
            streams = [client.submit(request(f"r{i}", 1, 1000, 5)) for i in range(2)]
            for stream in streams:
                await anext(stream)
            with pytest.raises(InvalidRequest, match="already running"):
                await collect(client, request("r0", 1))
            with pytest.raises(Overloaded) as full:
                await collect(client, request("r2", 1))
            assert full.value.retry_after_s is not None
            for stream in streams:
                await stream.aclose()

    run(test)


@pytest.mark.parametrize(
    ("factory", "error", "text"),
    [
        ("bad_checkpoint", CheckpointError, "model.safetensors is missing"),
        ("no_such_function", ConfigError, "no_such_function"),
        ("dies_while_loading", EngineLost, "exited with code 3"),
    ],
)
def test_a_load_failure_is_raised_by_start(factory: str, error: type, text: str) -> None:
    async def test() -> None:
        client = EngineClient(Path("some/model"), EngineConfig(), limits(factory))
        with pytest.raises(error, match=text):
            await client.start()
        assert client.pid is None
        assert not client.ready
        await client.close()

    run(test)


def test_loading_has_a_deadline() -> None:
    async def test() -> None:
        client = EngineClient(
            Path("some/model"), EngineConfig(), limits("never_loads", load_timeout_s=1.0)
        )
        with pytest.raises(EngineLost, match="within 1 s"):
            await client.start()

    run(test)


def test_a_killed_engine_ends_its_requests_and_is_restarted() -> None:
    async def test() -> None:
        # A back-off that leaves time to look at the state in between.
        async with running(limits(restart_backoff_s=0.3)) as client:
            started = client.submit(request("started", 100, 100_000, 5))
            await anext(started)
            # No chunk comes while the first step of this engine sleeps.
            silent = asyncio.ensure_future(collect(client, request("silent", HANG)))
            await until(lambda: client.num_requests == 2)
            pid = client.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            rest = [chunk async for chunk in started]
            assert rest[-1].finish is FinishReason.ERROR
            assert rest[-1].error_code == EngineLost.code
            assert "SIGKILL" in (rest[-1].error or "")
            with pytest.raises(EngineLost, match="SIGKILL"):
                await silent
            assert not client.ready
            assert client.state is EngineState.RESTARTING
            with pytest.raises(EngineLost) as lost:
                await collect(client, request("too early", 1))
            assert lost.value.retry_after_s is not None and lost.value.retry_after_s >= 1.0
            await until(lambda: client.ready)
            assert client.pid != pid
            assert client.restarts == 1
            assert tokens(await collect(client, request("next", 7, 3))) == [7, 8, 9]

    run(test)


def test_a_step_that_raises_ends_requests_with_its_reason_and_the_engine_restarts() -> None:
    async def test() -> None:
        async with running(limits()) as client:
            with pytest.raises(EngineLost, match="the step went wrong"):
                await collect(client, request("crash", CRASH))
            await until(lambda: client.ready)
            assert "the step went wrong" in client.last_error
            assert tokens(await collect(client, request("next", 7, 2))) == [7, 8]

    run(test)


def test_an_engine_without_sign_of_life_is_killed_and_restarted() -> None:
    async def test() -> None:
        # The idle engine reports all the time: it must survive this limit, the hanging one not.
        async with running(limits(hang_timeout_s=1.2)) as client:
            pid = client.pid
            await asyncio.sleep(1.5)
            assert client.pid == pid and client.ready
            with pytest.raises(EngineLost, match="no sign of life"):
                await collect(client, request("hang", HANG))
            await until(lambda: client.ready)
            assert client.pid != pid

    run(test)


def test_an_engine_that_dies_too_often_stays_failed(tmp_path: Path) -> None:
    async def test() -> None:
        supervision = limits("dies_when_restarted", max_restarts=1)
        client = EngineClient(tmp_path / "marker", EngineConfig(), supervision)
        await client.start()
        pid = client.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert "the disk is gone" in await client.wait_failed()
        assert client.state is EngineState.FAILED
        with pytest.raises(EngineLost, match="not restarted"):
            await collect(client, request("late", 1))
        await client.close()

    run(test)


def test_a_slow_reader_loses_only_its_own_request() -> None:
    async def test() -> None:
        async with running(limits(buffer_tokens=50)) as client:
            slow = client.submit(request("slow", 0, 10**6))
            first = await anext(slow)
            # Fewer tokens than the buffer holds: never too slow, however busy this machine is.
            quick = await collect(client, request("quick", 500, 45))
            assert tokens(quick) == list(range(500, 545))
            await until(lambda: client.num_requests == 0)
            rest = [chunk async for chunk in slow]
            assert rest[-1].finish is FinishReason.ERROR
            assert rest[-1].error_code == "client_closed_request"
            assert "too slow" in (rest[-1].error or "")
            got = tokens([first, *rest])
            assert got == list(range(len(got)))  # what was buffered is delivered, in order
            assert 50 <= len(got) <= 1000
            await until(lambda: client.stats().running == 0)

    run(test)


def test_abort_close_and_cancel_free_the_engine() -> None:
    async def test() -> None:
        async with running(limits()) as client:
            aborted = client.submit(request("aborted", 0, 10**6, 5))
            closed = client.submit(request("closed", 0, 10**6, 5))
            cancelled = asyncio.ensure_future(collect(client, request("cancelled", 0, 10**6, 5)))
            await anext(aborted)
            await anext(closed)
            await until(lambda: client.num_requests == 3)
            await client.abort("unknown")
            await client.abort("aborted")
            assert [chunk async for chunk in aborted][-1].finish is FinishReason.ABORT
            await closed.aclose()
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            await until(lambda: client.num_requests == 0)
            await until(lambda: client.stats().running == 0)
            # The ids are free again, and late chunks of the old requests are not mixed in.
            assert tokens(await collect(client, request("closed", 7, 2))) == [7, 8]

    run(test)


def test_drain_lets_running_requests_finish_and_takes_no_new_ones() -> None:
    async def test() -> None:
        async with running(limits()) as client:
            answer = asyncio.ensure_future(collect(client, request("a", 0, 30, 10)))
            await until(lambda: client.num_requests == 1)
            draining = asyncio.ensure_future(client.drain(DEADLINE_S))
            await asyncio.sleep(0)
            with pytest.raises(Draining):
                await collect(client, request("b", 1))
            assert not client.ready
            await draining
            assert tokens(await answer) == list(range(30))

    run(test)


def test_drain_aborts_what_is_left_at_its_timeout() -> None:
    async def test() -> None:
        async with running(limits()) as client:
            answer = asyncio.ensure_future(collect(client, request("a", 0, 10**6, 5)))
            await until(lambda: client.num_requests == 1)
            await client.drain(0.1)
            assert (await answer)[-1].finish is FinishReason.ABORT

    run(test)


def test_the_engine_ignores_signals_meant_for_the_server() -> None:
    async def test() -> None:
        async with running(limits()) as client:
            stream = client.submit(request("a", 0, 20, 10))
            chunks = [await anext(stream)]
            assert client.pid is not None
            os.kill(client.pid, signal.SIGTERM)
            os.kill(client.pid, signal.SIGINT)
            chunks += [chunk async for chunk in stream]
            assert tokens(chunks) == list(range(20))

    run(test)


PARENT = """
import asyncio, sys
from pathlib import Path
from headrace.config import EngineConfig
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.process import EngineClient, SupervisionConfig

async def main():
    limits = SupervisionConfig(factory="process_factories:scripted", import_paths=(sys.argv[1],))
    client = EngineClient(Path("m"), EngineConfig(), limits)
    await client.start()
    if sys.argv[2] == "hang":
        stream = client.submit(Request("a", (902, 1, 0), SamplingParams()))
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.3)
    assert "torch" not in sys.modules
    print("engine", client.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.parametrize("mode", ["idle", "hang"])
def test_a_dead_parent_leaves_no_engine(mode: str) -> None:
    root = str(Path(__file__).resolve().parents[3])
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, HERE, mode],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
    ) as parent:
        try:
            assert parent.stdout is not None
            pid = next(int(line.split()[1]) for line in parent.stdout if line.startswith("engine "))
            assert not process_is_gone(pid)
        finally:
            parent.kill()
        deadline_s = time.monotonic() + DEADLINE_S
        while not process_is_gone(pid):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)


def test_supervision_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match="hang_timeout_s"):
        SupervisionConfig(hang_timeout_s=-1.0)
