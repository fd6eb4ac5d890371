"""Train the draft module of a checkpoint for some seconds: resumes, logs, writes checkpoints.

    python train/draft.py --seconds 300 --total 300 --resume DIR --out DIR --english FILE

The target stays as it is; its features and its distribution are computed in the same step, or once
(--cache), where a forward of it is dear. --total: seconds of the whole recipe over all calls, which
the learning rate and the rounding of weights to their stored formats follow.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from train import parameters, selfcheck
from train.anchors import BlockMaker, sample_anchors
from train.checkpoint import load_latest, save
from train.data import FAMILY_NAMES, Plan, batches
from train.draft_forward import Blocks, DraftForward, Judged, draft_spec, judge
from train.loader import Stream
from train.optimiser import Optimiser, balance
from train.target import Target, TargetRows

LOG_EVERY = 60
SAVE_SECONDS = 90
# Shares of the losses (cross-entropy, distance to the target's distribution, confidence) and how
# fast the weight of later places falls.
SHARES = (0.1, 0.9, 1.0)
PLACE_DECAY = 4.0
WARMUP_STEPS = 100
ROUNDED_FROM = 0.5  # share of the recipe


@dataclass(slots=True)
class Counters:
    """What a checkpoint's meta.json holds. seconds: spent training, over all calls. batch: the
    next one of the data. fresh_since: step at which the optimiser knew nothing."""

    step: int = 0
    seconds: float = 0.0
    anchors: int = 0
    batch: int = 0
    fresh_since: int = 0


@dataclass(slots=True)
class Sums:
    """Since the last line of the log. places: counts, agreement, right, error of the confidence,
    each summed over the blocks, [4, n]; lengths: accepted tokens by family, greedy, and blocks."""

    places: Tensor
    lengths: Tensor
    loads: dict[int, Tensor] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)


def total_loss(judged: Judged, counts: Tensor) -> Tensor:
    """0.1 cross-entropy + 0.9 distance + 1.0 confidence, each a weighted mean over the places
    [A, n] that count; place k (from 0) weighs exp(-k / 4)."""
    place = torch.arange(counts.shape[1], device=counts.device)
    weight = torch.exp(-place / PLACE_DECAY) * counts
    weight = (weight / weight.sum().clamp_min(1.0)).flatten()
    confidence = torch.nn.functional.binary_cross_entropy_with_logits(
        judged.confidence, judged.agreement, reduction="none"
    )
    parts = (judged.cross, judged.distance, confidence)
    return sum(
        (share * (part * weight).sum() for share, part in zip(SHARES, parts, strict=True)),
        start=torch.zeros((), device=weight.device),
    )


def rate_at(progress: float, steps: int) -> float:
    """A cosine from 1 to 0 over the recipe, with a warm-up by steps since the optimiser is fresh
    (seconds would count compilation)."""
    return min(1.0, (steps + 1) / WARMUP_STEPS) * max(
        0.01, 0.5 + 0.5 * math.cos(math.pi * progress)
    )


class DraftTrainer:
    """Target, draft module, optimiser and data of one run."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        on_gpu = self.device.type == "cuda"
        torch.backends.cuda.matmul.allow_tf32 = True
        self.dtype = getattr(torch, given.dtype)
        compiled = on_gpu and not given.no_compile
        self.target = Target(
            given.target,
            self.device,
            self.dtype,
            compiled=compiled,
            num_nextn_predict_layers=given.stages,
        )
        self.spec = self.target.spec
        self.draft = draft_spec(self.spec)
        self.last = f"mtp.{self.draft.stages - 1}."
        fused = compiled and selfcheck.sinkhorn_works(self.spec, self.device)
        self.forward = DraftForward(self.spec, fused_sinkhorn=fused, compiled=compiled)
        self.judge = torch.compile(judge, dynamic=False) if compiled else judge
        self.blocks = BlockMaker(self.spec, self.device, torch.float32)
        self.counters = Counters()
        found = load_latest(given.resume, self.spec, draft=True)
        masters = parameters.initial(self.spec, given.seed, draft=True)
        if found is not None:
            masters = found.masters
            known = {f.name for f in fields(Counters)}
            self.counters = Counters(**{k: v for k, v in found.meta.items() if k in known})
            if found.optimiser is None:
                self.counters.fresh_since = self.counters.step
            say(resumed=self.counters.step, with_optimiser=found.optimiser is not None)
        self.masters = {n: m.detach().to(self.device).float() for n, m in masters.items()}
        self.optimiser = Optimiser(self.masters, self.spec)
        if found is not None and found.optimiser is not None:
            self.optimiser.restore(found.optimiser)
        self.kinds = parameters.kinds(self.spec, draft=True)
        self.generator = torch.Generator().manual_seed(given.seed + self.counters.step)
        self.rows = self._cached() if given.cache else self._fresh()
        self.log = (given.out / "log.jsonl").open("a", encoding="utf-8")
        self.sums = self._new_sums()

    # --- data ----------------------------------------------------------------------------------

    def _fresh(self) -> Iterator[TargetRows]:
        """New text in every step."""
        given = self.given
        plan = Plan(
            length=given.length,
            rows=given.tokens // given.length,
            english=given.english_share if given.english else 0.0,
        )
        source = batches(
            plan,
            given.target / "tokenizer.json",
            seed=given.seed,
            english=given.english,
            start=self.counters.batch,
            workers=given.workers,
            ahead=1,
        )
        stream = Stream(source, self.counters.batch, self.device)
        while True:
            batch = stream.next()
            yield self.target.read(batch, self.generator)
            self.counters.batch = batch.number + 1

    def _cached(self) -> Iterator[TargetRows]:
        """The same text again and again in changing order, read once by the target."""
        path = self.given.cache
        if not path.exists():
            self._fill_cache(path)
        parts = [TargetRows(*row) for row in torch.load(path, mmap=True, weights_only=True)]
        while True:
            for number in torch.randperm(len(parts), generator=self.generator).tolist():
                yield TargetRows(*(getattr(parts[number], f.name) for f in fields(TargetRows)))

    def _fill_cache(self, path: Path) -> None:
        began, found = time.monotonic(), []
        source = self._fresh()
        for number in range(self.given.cache_batches):
            rows = next(source)
            found.append(tuple(getattr(rows, f.name).cpu() for f in fields(TargetRows)))
            if number % 20 == 0:
                say(cached=number, seconds=round(time.monotonic() - began, 1))
        self.counters.batch = 0
        torch.save(found, path)

    # --- one step ------------------------------------------------------------------------------

    def step(self, progress: float) -> None:
        """Draw a batch, apply the gradients of its anchors in groups, count."""
        rows = next(self.rows)
        for _ in range(self.given.groups):
            anchors = sample_anchors(rows.weights, self.given.anchors, self.generator)
            blocks = self.blocks.make(anchors, rows.ids, rows.positions, rows.weights)
            self._learn(rows, blocks, anchors, progress)
            self.counters.step += 1
            self.counters.anchors += len(anchors)

    def _learn(self, rows: TargetRows, blocks: Blocks, anchors: Tensor, progress: float) -> None:
        p = parameters.working(
            self.masters, self.kinds, self.dtype, quantised=progress >= ROUNDED_FROM
        )
        turn = self.blocks.turns(rows.positions.flatten())
        head, embed = (self.target.working[name] for name in ("head.weight", "embed.weight"))
        drafted = self.forward(p, embed, rows.features, turn, blocks, rounded=True)
        judged = self.judge(
            p,
            self.last,
            head,
            self.spec.rms_eps,
            drafted.hidden,
            rows.hidden[blocks.source.flatten()],
            blocks.previous.flatten(),
            blocks.labels.flatten(),
        )
        loss = total_loss(judged, blocks.counts)
        loss.backward()
        self._clip()
        rate = rate_at(progress, self.counters.step - self.counters.fresh_since)
        self.optimiser.step(rate)
        balance(self.masters, drafted.loads, min(1.0, rate), "mtp")
        self._account(loss, judged, blocks, rows.families.flatten()[anchors], drafted.loads)

    def _clip(self) -> None:
        """Bound the gradients of what AdamW moves (Muon normalises by itself)."""
        found = [
            p.grad
            for group in self.optimiser.adam.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        norm = torch.stack(torch._foreach_norm(found)).norm()
        torch._foreach_mul_(found, (1.0 / (norm + 1e-6)).clamp_max(1.0))

    # --- log and checkpoints -------------------------------------------------------------------

    def _new_sums(self) -> Sums:
        n = self.draft.block_size
        return Sums(
            torch.zeros((4, n), device=self.device),
            torch.zeros((2, len(FAMILY_NAMES)), device=self.device),
        )

    @torch.no_grad()
    def _account(
        self,
        loss: Tensor,
        judged: Judged,
        blocks: Blocks,
        families: Tensor,
        loads: dict[int, Tensor],
    ) -> None:
        sums, counts = self.sums, blocks.counts.float()
        right = judged.right.view(counts.shape).float() * counts
        error = (torch.sigmoid(judged.confidence) - judged.agreement).abs().view(counts.shape)
        agreement = judged.agreement.view(counts.shape)
        sums.places += torch.stack([counts, agreement * counts, right, error * counts]).sum(1)
        full = counts[:, -1]  # blocks that the end of the answer does not cut
        sums.lengths[0].index_add_(0, families, (1 + right.cumprod(1).sum(1)) * full)
        sums.lengths[1].index_add_(0, families, full)
        sums.losses.append(loss.detach())
        sums.loads = loads

    def write_log(self, progress: float, seconds: float) -> bool:
        """One line of the log; whether the losses are finite."""
        sums = self.sums
        shares = (sums.places[1:] / sums.places[0].clamp_min(1.0)).tolist()
        lengths = (sums.lengths[0] / sums.lengths[1].clamp_min(1.0)).tolist()
        loss = float(torch.stack(sums.losses).mean())
        names = zip(FAMILY_NAMES, lengths, sums.lengths[1].tolist(), strict=True)
        line: dict[str, Any] = {
            **asdict(self.counters),
            "progress": round(progress, 3),
            "step_ms": round(1000 * seconds / len(sums.losses), 1),
            "loss": round(loss, 4),
            "length": round(float(sums.lengths[0].sum() / sums.lengths[1].sum().clamp_min(1)), 3),
            "families": {name: round(length, 2) for name, length, seen in names if seen > 0},
            **{
                name: [round(value, 3) for value in values]
                for name, values in zip(
                    ("agreement", "right", "confidence_error"), shares, strict=True
                )
            },
            "load": [round(float(load.max() / load.mean()), 2) for load in sums.loads.values()],
        }
        self.sums = self._new_sums()
        self.log.write(json.dumps(line) + "\n")
        self.log.flush()
        print(json.dumps(line), flush=True)
        return math.isfinite(loss)

    def save(self) -> None:
        """Both checkpoints."""
        meta = asdict(self.counters)
        save(self.given.out / "draft", self.masters, self.spec, meta, draft=True)
        if self.given.local is not None:
            state = self.optimiser.state()
            save(self.given.local, self.masters, self.spec, meta, state, draft=True)

    def run(self, stop: list[bool]) -> bool:
        """Steps until the seconds are over or `stop` is set; whether all went well."""
        given = self.given
        started = logged = saved = time.monotonic()
        before, healthy, next_log = self.counters.seconds, True, 1
        while not stop and healthy:
            spent = time.monotonic() - started
            if spent >= given.seconds or self.counters.step >= given.steps:
                break
            self.counters.seconds = before + spent
            progress = min(1.0, self.counters.seconds / given.total)
            self.step(progress)
            if len(self.sums.losses) >= next_log:
                healthy = self.write_log(progress, time.monotonic() - logged)
                logged, next_log = time.monotonic(), min(LOG_EVERY, 4 * next_log)
            if healthy and time.monotonic() - saved > SAVE_SECONDS:
                self.save()
                saved = time.monotonic()
        self.counters.seconds = before + time.monotonic() - started
        if healthy:
            self.save()
        self.log.close()
        say(done=True, healthy=healthy, **asdict(self.counters))
        return healthy


def say(**facts: Any) -> None:
    """A line for whoever watches."""
    print(json.dumps(facts), flush=True)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--total", type=float, help="default: --seconds")
    parser.add_argument("--steps", type=int, default=10**9, help="stop at this step at the latest")
    parser.add_argument("--target", type=Path, default=Path("headrace/assets/tiny"))
    parser.add_argument("--stages", type=int, default=2, help="layers of the draft module")
    parser.add_argument("--resume", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--local", type=Path)
    parser.add_argument("--english", type=Path)
    parser.add_argument("--english-share", type=float, default=0.1, help="of the rows")
    parser.add_argument("--cache", type=Path, help="file for the target's features; made if absent")
    parser.add_argument("--cache-batches", type=int, default=256)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=139264, help="that the target reads at once")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--anchors", type=int, default=4096, help="of a step")
    parser.add_argument("--groups", type=int, default=6, help="steps on one batch")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true")
    given = parser.parse_args(words)
    given.total = given.total or given.seconds
    return given


def main() -> None:
    """Entry point; leaves without waiting for the data processes."""
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    stop: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    healthy = DraftTrainer(given).run(stop)
    sys.stdout.flush()
    os._exit(0 if healthy else 1)


if __name__ == "__main__":
    main()
