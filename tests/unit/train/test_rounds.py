"""Speculative rounds without an engine: streams do not depend on drafts, `maximal` is exact."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.check.case import Runner
from headrace.model.deepseek.model import Model
from headrace.model.loader import load_model
from headrace.model.tiny import write_tiny
from headrace.ops.numerics import Numerics
from train.rounds import Chat, Player, noise, probabilities

LIMIT = 14


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, quantised=False, seed=5)
    return load_model(path, Numerics("float64", kv_quant=False), with_draft=True)


def chats() -> list[Chat]:
    rng = np.random.default_rng(3)
    prompts = [tuple(rng.integers(5, 500, size).tolist()) for size in (3, 40, 17)]
    return [Chat(f"f{n}", prompt, LIMIT + n, 70 + n) for n, prompt in enumerate(prompts)]


def one_by_one(model: Model, chat: Chat, temperature: float) -> list[int]:
    """The answer without speculation."""
    prompt = len(chat.prompt)
    ids = np.array([*chat.prompt, *[0] * chat.limit])
    runner, chunk = Runner(model, len(ids)), prompt
    for place in range(prompt, len(ids)):
        p = probabilities(runner.run(ids, [chunk], "last"), temperature)[0]
        with np.errstate(divide="ignore"):
            scores = np.log(p) + (noise(chat.seed, place, len(p)) if temperature else 0.0)
        ids[place], chunk = int(scores.argmax()), 1
        if ids[place] == model.spec.eos_id:
            return [int(x) for x in ids[prompt : place + 1]]
    return [int(x) for x in ids[prompt:]]


class Recorder(Player):
    """Keeps the answers, and drafts what `oracle` knows with some places made wrong."""

    def __init__(self, *given: object, oracle: dict[int, list[int]] | None = None) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.answers: dict[int, list[int]] = {}
        self.oracle = oracle

    def _append(self, one, tokens) -> None:  # type: ignore[no-untyped-def]
        super()._append(one, tokens)
        self.answers.setdefault(one.chat.seed, []).extend(tokens)

    def _draft(self, playing, cache) -> None:  # type: ignore[no-untyped-def]
        super()._draft(playing, cache)
        for one in playing if self.oracle else ():
            known = self.oracle[one.chat.seed] + [0] * self.count
            at = one.known - len(one.chat.prompt)
            one.drafts = np.array(known[at : at + self.count])
            wrong = one.known % (self.count + 1)  # every number of accepted drafts comes up
            one.drafts[wrong:] = (one.drafts[wrong:] + 1) % 500


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_streams_are_those_without_speculation(model: Model, temperature: float) -> None:
    expected = {chat.seed: one_by_one(model, chat, temperature) for chat in chats()}
    for oracle in (None, expected):
        player = Recorder(model, temperature, "gumbel", 2, oracle=oracle)
        rounds = list(player.play(chats()))
        assert player.answers == expected
        assert sum(one.emitted for one in rounds) == sum(len(a) - 1 for a in expected.values())
        assert sum(one.ended for one in rounds) == len(expected)
    held = {int(one.accepted.sum()) for one in rounds}
    assert held == set(range(player.count + 1))


def test_the_answer_ends_inside_a_round(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chats()[1]
    answer = one_by_one(model, chat, 0.0)
    behind = 0
    for end in [n for n, token in enumerate(answer) if n and token not in answer[:n]][:8]:
        monkeypatch.setattr(model, "spec", replace(model.spec, eos_id=answer[end]))
        player = Recorder(model, 0.0, "gumbel", 1, oracle={chat.seed: answer})
        *others, last = player.play([chat])
        assert player.answers[chat.seed] == answer[: end + 1]
        assert last.ended and not any(one.ended for one in others)
        # The place that drafts the end is the last one that says anything.
        assert int(last.observed.sum()) == min(last.emitted, player.count)
        assert all(one.observed.all() for one in others)
        behind += int(last.accepted.sum()) > last.emitted
    assert behind  # drafts behind the end were accepted too


def test_maximal_keeps_the_targets_distribution() -> None:
    rng = np.random.default_rng(0)
    p, q = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.1, 0.2, 0.3, 0.4])
    player = Player.__new__(Player)
    player.temperature, player.coupling, player.count = 1.0, "maximal", 1
    counts, held, trials = np.zeros(4), 0, 20_000
    one = type("One", (), {"rng": rng, "weights": [q]})()
    for _ in range(trials):
        draft = int(rng.choice(4, p=q))
        one.drafts = [draft]
        token = player._target(one, p, 0)  # type: ignore[arg-type]
        counts[token] += 1
        held += token == draft
    assert np.abs(counts / trials - p).max() < 0.015
    # A rejected draft never comes back from the rest, so this counts acceptance alone.
    assert abs(held / trials - np.minimum(p, q).sum()) < 0.015


def test_probabilities_at_temperature_zero_take_the_lowest_of_the_best() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, -1.0]])
    assert probabilities(logits, 0.0).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_noise_is_a_function_of_seed_and_position() -> None:
    assert np.array_equal(noise(1, 2, 8), noise(1, 2, 8))
    assert not np.array_equal(noise(1, 2, 8), noise(2, 1, 8))
