"""How near the verification policy comes to a perfect selector, on a fixed load.

    python bench/verify.py LOAD_FILE [--rounds 2000] [--only KAPPA,LOAD] [--out FILE]

LOAD_FILE is the fixed input "headrace-dspark-load/1": cost curves, survivals, spread of confidences
(kappa), loads, and check values, which are reproduced first (a difference is an error). Then every
policy runs over the same rounds and confidences:

- `ours`: `Controller` as the engine uses it: budget from earlier rounds, split by the newest
  confidences, confidence corrected online from the outcomes.
- `as_reported`: the same without the correction. Each keeps the rule that no draft decides about
  itself; the optimum does not.
- `peer` is the exhaustive optimum: budget and split from the round itself and the TRUE acceptance
  probabilities. Others: the best fixed length, 5, and no speculation (without a draft pass).

One JSON line per kappa, load and variant: expected tokens per second (sum of true survivals, no
outcome noise); `ratio` is the median of ours / optimum over `n` blocks of rounds after the warm-up,
`spread` its range; the other ratios are over all those rounds. `decision_us` lines are CPU times of
one decision (budget and split).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from headrace.core.speculation import ADAPTIVE
from headrace.engine.speculation.confidence import sigmoid
from headrace.engine.speculation.controller import Controller
from headrace.engine.speculation.cost import StepCost
from headrace.engine.speculation.curve import Curve
from headrace.engine.speculation.policy import StepLoad, budget
from headrace.platforms import CpuPlatform

FORMAT = "headrace-dspark-load/1"
CHECK_ROUNDS = 400
BLOCKS = 15
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rounds:
    """probability [N, R, G]: true acceptance given the drafts before; survival: its cumulative
    products; accepted int64 [N, R]; reported: what the selector is told."""

    probability: Floats
    survival: Floats
    accepted: NDArray[np.int64]
    reported: Floats


def read_load(path: Path) -> dict:
    """The load file. Raises ValueError for another format."""
    load = json.loads(path.read_text(encoding="utf-8"))
    if load.get("format") != FORMAT:
        raise ValueError(f"{path} has format {load.get('format')!r}, expected {FORMAT!r}.")
    return load


def cost_of(load: dict) -> StepCost:
    """The cost model of the file, in seconds."""
    verify = load["verify_curve_ms"]
    draft, sampler = load["draft_ms"], load["sampler_ms"]
    return StepCost(
        Curve(verify["rows"], np.array(verify["ms"]) / 1e3),
        Curve.linear(draft["per_round"] / 1e3, draft["per_request"] / 1e3),
        Curve.linear(sampler["per_round"] / 1e3, sampler["per_request"] / 1e3),
    )


def draw(load: dict, kappa: int, requests: int, rounds: int, variant: str) -> Rounds:
    """Confidences and outcomes in the order that the file prescribes."""
    survival = np.array(load["mean_survival"])
    means = survival / np.concatenate(([1.0], survival[:-1]))
    shape = (requests, load["draft_length"])
    generator = np.random.default_rng([20261129, kappa, requests])
    probability, accepted = np.empty((rounds, *shape)), np.empty((rounds, requests), dtype=np.int64)
    for i in range(rounds):
        drawn = generator.beta(kappa * means, kappa * (1 - means), size=shape)
        probability[i] = np.clip(drawn, 1e-6, 1 - 1e-6)
        accepted[i] = np.cumprod(generator.random(shape) < probability[i], axis=1).sum(axis=1)
    logit = np.log(probability / (1 - probability))
    reported = probability if variant == "calibrated" else sigmoid(logit / 1.5)
    return Rounds(probability, np.cumprod(probability, axis=2), accepted, reported)


class Speed:
    """Expected tokens and seconds of every round under one policy."""

    def __init__(self, cost: StepCost, survival: Floats) -> None:
        self._survival = survival
        rounds, self._requests, self._length = survival.shape
        self.tokens, self.seconds = np.zeros(rounds), np.zeros(rounds)
        self.rows = np.zeros(rounds)
        most = self._requests * (1 + self._length)
        overhead_s = cost.sampler_s(self._requests) + cost.draft_s(self._requests)
        self._seconds_by_rows = cost.verify_s(0, most + 1) + overhead_s

    def add(self, i: int, lengths: NDArray[np.int64]) -> None:
        """Round i verified these lengths [R]."""
        admitted = np.arange(self._length) < lengths[:, None]
        self.tokens[i] = self._requests + self._survival[i][admitted].sum()
        self.rows[i] = self._requests + lengths.sum()
        self.seconds[i] = self._seconds_by_rows[int(self.rows[i])]

    def per_s(self, part: slice) -> float:
        """Tokens per second over a part of the rounds."""
        return float(self.tokens[part].sum() / self.seconds[part].sum())


def fixed(cost: StepCost, survival: Floats, length: int) -> Speed:
    """Every request verifies `length` drafts each round."""
    speed = Speed(cost, survival)
    for i in range(len(survival)):
        speed.add(i, np.full(survival.shape[1], length))
    return speed


def same_round(cost: StepCost, survival: Floats, told: Floats) -> Speed:
    """Budget and split from the round's own survivals `told`: the optimum if they are true."""
    speed = Speed(cost, survival)
    requests, length = survival.shape[1:]
    wanted, limits = np.full(requests, ADAPTIVE), np.full(requests, length)
    for i in range(len(survival)):
        decision = budget(StepLoad(told[i][None], wanted, limits), cost, draft=True)
        speed.add(i, decision.lengths(told[i]))
    return speed


def causal(cost: StepCost, rounds: Rounds, correct: bool) -> Speed:
    """Our policy as a blocking engine runs it; correct: whether outcomes correct the confidence."""
    speed = Speed(cost, rounds.survival)
    requests, length = rounds.survival.shape[1:]
    controller = Controller(requests, length, cost)
    rows = np.arange(requests)
    wanted, limits = np.full(requests, ADAPTIVE), np.full(requests, length)
    features = np.log(rounds.reported / (1 - rounds.reported))
    for i in range(len(features)):
        controller.launch(rows)
        controller.arrive(rows, features[i])
        decision = controller.decide(rows, wanted, limits)
        if not decision.draft:
            raise RuntimeError("drafting pays at every load of this file, but was switched off")
        lengths = decision.lengths(controller.newest(rows))
        if correct:
            controller.outcome(rows, lengths, np.minimum(lengths, rounds.accepted[i]))
        speed.add(i, lengths)
    return speed


def check(load: dict, cost: StepCost, kappa: int, requests: int) -> int:
    """Compare with the check values of the file; how many there were. Raises RuntimeError."""
    part = slice(0, CHECK_ROUNDS)
    calibrated = draw(load, kappa, requests, CHECK_ROUNDS, "calibrated")
    reported = draw(load, kappa, requests, CHECK_ROUNDS, "miscalibrated").reported
    survival = calibrated.survival
    speeds = [fixed(cost, survival, k).per_s(part) for k in range(1, load["draft_length"] + 1)]
    optimum = same_round(cost, survival, survival)
    found = {
        "fixed_5": round(speeds[4]),
        "best_fixed_length": int(np.argmax(speeds)) + 1,
        "best_fixed": round(max(speeds)),
        "same_round_optimum_calibrated": round(optimum.per_s(part)),
        "mean_rows_per_request": round(float(optimum.rows.mean()) / requests, 2),
        "same_round_miscalibrated": round(
            same_round(cost, survival, np.cumprod(reported, axis=2)).per_s(part)
        ),
    }
    table = load["check_expected_tokens_per_s"]
    for values in table["rows"]:
        expected = dict(zip(table["columns"], values, strict=True))
        if (expected["kappa"], expected["load"]) == (kappa, requests):
            wrong = {name: value for name, value in found.items() if value != expected[name]}
            if wrong:
                raise RuntimeError(f"kappa {kappa}, load {requests}: {wrong}, expected {expected}")
            return len(found)
    raise RuntimeError(f"the file has no check values for kappa {kappa}, load {requests}")


def compare(load: dict, cost: StepCost, kappa: int, requests: int, variant: str, n: int) -> dict:
    """One record: all policies over n rounds."""
    rounds = draw(load, kappa, requests, n, variant)
    survival = rounds.survival
    part = slice(load["warmup_rounds"], n)
    lengths = range(load["draft_length"] + 1)
    speeds = [fixed(cost, survival, k).per_s(part) for k in lengths]
    best = int(np.argmax(speeds))
    optimum = same_round(cost, survival, survival)
    told = same_round(cost, survival, np.cumprod(rounds.reported, axis=2))
    ours = causal(cost, rounds, correct=True)
    as_reported = causal(cost, rounds, correct=False)
    off = requests / (cost.verify_s(requests, 1)[0] + cost.sampler_s(requests))
    edges = np.linspace(part.start, n, BLOCKS + 1).astype(int)
    blocks = [slice(a, b) for a, b in pairwise(edges)]
    ratios = [ours.per_s(block) / optimum.per_s(block) for block in blocks]
    mine = ours.per_s(part)
    return {
        "name": f"verify-kappa{kappa}-load{requests}-{variant}",
        "ours": round(mine, 1),
        "peer": round(optimum.per_s(part), 1),
        "ratio": round(float(np.median(ratios)), 4),
        "spread": [round(min(ratios), 4), round(max(ratios), 4)],
        "n": BLOCKS,
        "unit": "expected tokens/s; peer: exhaustive optimum (perfect selector, same round)",
        "rounds": n,
        "rows_per_request": round(float(ours.rows[part].mean()) / requests, 2),
        "over_optimum": round(mine / optimum.per_s(part), 4),
        "over_same_round_as_told": round(mine / told.per_s(part), 4),
        "over_best_fixed": round(mine / speeds[best], 4),
        "best_fixed_length": best,
        "over_fixed_5": round(mine / speeds[5], 4),
        "over_off": round(mine / float(off), 4),
        "as_reported_over_optimum": round(as_reported.per_s(part) / optimum.per_s(part), 4),
        "as_reported_over_best_fixed": round(as_reported.per_s(part) / speeds[best], 4),
    }


def decision_times(load: dict, cost: StepCost, requests: int, turns: int = 400) -> dict:
    """CPU microseconds of budget + split, and of all that the controller does in a step."""
    rounds = draw(load, 5, requests, turns, "calibrated")
    features = np.log(rounds.probability / (1 - rounds.probability))
    controller, rows = Controller(requests, rounds.survival.shape[2], cost), np.arange(requests)
    wanted = np.full(requests, ADAPTIVE)
    limits = np.full(requests, rounds.survival.shape[2])
    deciding, whole = [], []
    for i in range(turns):
        start = time.process_time_ns()
        controller.launch(rows)
        controller.arrive(rows, features[i])
        before = time.process_time_ns()
        decision = controller.decide(rows, wanted, limits)
        lengths = decision.lengths(controller.newest(rows))
        after = time.process_time_ns()
        controller.outcome(rows, lengths, np.minimum(lengths, rounds.accepted[i]))
        deciding.append((after - before) / 1e3)
        whole.append((time.process_time_ns() - start) / 1e3)
    median, low, high = (float(np.percentile(deciding, q)) for q in (50, 10, 90))
    return {
        "name": f"verify-decision-{requests}x{rounds.survival.shape[2]}",
        "ours": round(median, 1),
        "peer": None,
        "ratio": None,
        "spread": [round(low, 1), round(high, 1)],
        "n": turns,
        "unit": "us of CPU time a decision (budget and split); spread: 10 to 90 %",
        "whole_step": round(float(np.median(whole)), 1),
    }


def records(load: dict, rounds: int, only: tuple[int, int] | None) -> Iterator[dict]:
    """All measurements; check values first."""
    cost = cost_of(load)
    cases = [
        (kappa, requests)
        for kappa in load["confidence_model"]["kappa"]
        for requests in load["loads"]
        if only is None or only == (kappa, requests)
    ]
    checked = sum(check(load, cost, *case) for case in cases)
    unit = "check values of the file reproduced to the last digit"
    shared = {"peer": checked, "ratio": 1.0, "spread": [1.0, 1.0], "n": 1, "unit": unit}
    yield {"name": "verify-check-values", "ours": checked, **shared}
    for case in cases:
        for variant in load["confidence_model"]["variants"]:
            yield compare(load, cost, *case, variant, rounds)
    for requests in load["loads"]:
        yield decision_times(load, cost, requests)


def main() -> None:
    """Print one JSON line per record, and append them to --out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("load_file", type=Path)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", help="KAPPA,LOAD")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    load = read_load(arguments.load_file)
    rounds = arguments.rounds or load["rounds"]
    only = tuple(map(int, arguments.only.split(","))) if arguments.only else None
    env = {**asdict(CpuPlatform().fingerprint()), "cores": CpuPlatform().cores()}
    for record in records(load, rounds, only):
        line = json.dumps({**record, "env": env})
        print(line, flush=True)
        if arguments.out:
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
