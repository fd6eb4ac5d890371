"""Fixtures of the server tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.scripted import LiveServer, answer


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """One server per module; `engine.script` is reset for every test."""
    with LiveServer() as live:
        yield live


@pytest.fixture(autouse=True)
def fresh_script(request: pytest.FixtureRequest) -> None:
    if "server" in request.fixturenames:
        live = request.getfixturevalue("server")
        if not isinstance(live, LiveServer):
            return
        live.engine.script = answer(reasoning="Hm.")
        live.engine.ready = True
        live.state.draining = False
