"""Measures a checkpoint's draft module on chats that no training saw, and calibrates it.

    python -m train.draft_eval MODEL [--calibrate] [--n 20] [--out FILE]

Chats of the task families are answered by speculative decoding (`train.rounds`): greedily, and at
temperature 0.7 under both couplings. --calibrate fits the confidence temperatures first, on other
seeds, greedy and `gumbel` rounds together, and writes them into MODEL/config.json as
`dspark_confidence_temperatures`, which the engine takes as its default.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.engine.speculation.confidence import (
    confidences,
    ece,
    fit_temperatures,
    survivals,
)
from headrace.eval.families import FAMILIES, draw
from headrace.eval.items import FIRST_TEST_SEED, Draw
from headrace.model.deepseek.model import Model
from headrace.model.loader import load_model
from headrace.ops.numerics import Numerics
from train.data import Encoder
from train.draft_forward import draft_spec
from train.export import write_config
from train.rounds import Chat, Coupling, Player, Round

# Neither trained on nor measured.
CALIBRATION_SEED = 2 * FIRST_TEST_SEED
RECALL_TOKENS = 700
TEMPERATURE = 0.7
# (name, temperature, coupling)
RUNS: tuple[tuple[str, float, Coupling], ...] = (
    ("greedy", 0.0, "gumbel"),
    ("gumbel", TEMPERATURE, "gumbel"),
    ("maximal", TEMPERATURE, "maximal"),
)


def chats(tokenizer_json: Path, first_seed: int, count: int) -> list[Chat]:
    """`count` chats of every family, from `first_seed` on; every second one thinks."""
    encoder = Encoder(tokenizer_json)
    made = []
    for family in FAMILIES:
        for seed in range(first_seed, first_seed + count):
            item = draw(family, seed, Draw(thinking=seed % 2 == 0, tokens=RECALL_TOKENS))[-1]
            ids, weights = encoder.items([item])[0]
            # The answer is what follows the last token without loss.
            start = max(place for place, weight in enumerate(weights) if weight == 0) + 1
            limit = 2 * (len(ids) - start) + 24
            made.append(Chat(family, tuple(ids[:start]), limit, seed))
    # The longest first: the batch stays full to the end.
    return sorted(made, key=lambda chat: -chat.limit)


def outcomes(
    rounds: Sequence[Round],
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
    """(confidence, accepted, observed) of at least one round, each [rounds, n]."""
    return (
        np.stack([one.confidence for one in rounds]),
        np.stack([one.accepted for one in rounds]),
        np.stack([one.observed for one in rounds]),
    )


def survival_error(
    rounds: Sequence[Round], temperatures: Sequence[float]
) -> tuple[float, list[float]]:
    """Calibration error of the survivals: over all places, and of each (0 where none is observed).

    Places behind the end of an answer are not observed and count nowhere.
    """
    confidence, accepted, observed = outcomes(rounds)
    predicted = survivals(confidences(confidence, temperatures))
    by_place = [
        ece(predicted[seen, k], accepted[seen, k]) if seen.any() else 0.0
        for k, seen in enumerate(observed.T)
    ]
    # The first place of a round is always observed.
    return ece(predicted[observed], accepted[observed]), by_place


def summary(rounds: Sequence[Round], temperatures: Sequence[float]) -> dict[str, Any]:
    """Figures of a run. length: tokens per round, as a client gets them (the end of an answer cuts
    a round); whole: of rounds that do not end an answer. accepted: share of drafts at each place
    that hold where all before them do; overlap: what `maximal` expects there."""
    confidence, accepted, observed = outcomes(rounds)
    before = np.concatenate((np.ones_like(accepted[:, :1]), accepted[:, :-1]), 1)
    reached = observed & before
    overlap = np.stack([one.overlap for one in rounds])
    error, by_place = survival_error(rounds, temperatures)
    raw, _ = survival_error(rounds, [1.0] * confidence.shape[1])

    def share(values: Any) -> list[float]:
        totals = reached.sum(0).clip(1)
        return [round(float(x), 4) for x in (values * reached).sum(0) / totals]

    def length(chosen: Sequence[Round]) -> float:
        return round(float(np.mean([one.emitted for one in chosen])), 3) if chosen else 0.0

    families = sorted({one.family for one in rounds})
    return {
        "rounds": len(rounds),
        "length": length(rounds),
        "whole": length([one for one in rounds if not one.ended]),
        "accepted": share(accepted),
        "overlap": share(overlap),
        "calibration_error": round(error, 4),
        "calibration_error_by_place": [round(value, 4) for value in by_place],
        "calibration_error_raw": round(raw, 4),
        "families": {f: length([one for one in rounds if one.family == f]) for f in families},
    }


def measure(
    model: Model, asked: Sequence[Chat], batch: int, runs: Sequence[tuple[str, float, Coupling]]
) -> Iterator[tuple[str, list[Round], float]]:
    """(name, rounds, seconds) of every run."""
    for name, temperature, coupling in runs:
        began = time.monotonic()
        rounds = list(Player(model, temperature, coupling, batch).play(asked))
        yield name, rounds, time.monotonic() - began


def calibrate(model: Model, directory: Path, count: int, batch: int) -> list[float]:
    """Fit the temperatures and write them into the checkpoint's config.json."""
    asked = chats(directory / "tokenizer.json", CALIBRATION_SEED, count)
    found = [one for _, rounds, _ in measure(model, asked, batch, RUNS[:2]) for one in rounds]
    temperatures = [round(float(t), 6) for t in fit_temperatures(*outcomes(found))]
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["dspark_confidence_temperatures"] = temperatures
    write_config(config, directory)
    return temperatures


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--n", type=int, default=20, help="chats of a family")
    parser.add_argument("--seed", type=int, default=FIRST_TEST_SEED)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file that one JSON line per run is added to")
    given = parser.parse_args()
    if given.seed < FIRST_TEST_SEED:
        raise SystemExit(f"--seed {given.seed}: seeds below {FIRST_TEST_SEED} may be trained on.")
    torch.set_num_threads(given.threads)
    model = load_model(given.model, Numerics(), with_draft=True)
    temperatures = list(draft_spec(model.spec).confidence_temperatures)
    if given.calibrate:
        temperatures = calibrate(model, given.model, given.n, given.batch)
        print(json.dumps({"temperatures": temperatures}), flush=True)
    asked = chats(given.model / "tokenizer.json", given.seed, given.n)
    for name, rounds, seconds in measure(model, asked, given.batch, RUNS):
        line = {"run": name, "chats": len(asked), **summary(rounds, temperatures)}
        print(json.dumps({**line, "seconds": round(seconds, 1)}), flush=True)
        if given.out is not None:
            with given.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**line, "temperatures": temperatures}) + "\n")


if __name__ == "__main__":
    main()
