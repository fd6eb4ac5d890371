"""What of a model's text is shown."""

from __future__ import annotations

import pytest

from headrace.cli.chat_screen import ChatScreen


def test_spaces_of_thoughts_survive_empty_pieces_of_the_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen = ChatScreen(interactive=False)
    for piece in ("\n", "27", " +", " ", "58", ":"):
        screen.thought(piece)
        screen.content("")
    for piece in ("", "8", " ", "5", "\n"):
        screen.thought("")
        screen.content(piece)
    screen.answer_ended()
    shown = capsys.readouterr()
    assert shown.err == "27 + 58:\n"
    assert shown.out == "8 5\n"
