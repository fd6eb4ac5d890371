"""Train the embedded model for some seconds: resumes, logs losses by family, writes checkpoints.

    python train/run.py --seconds 500 --total 1500 --resume DIR --out DIR --local DIR --data train

--total: seconds of the whole recipe over all calls; the schedule follows the share already spent.
--resume: directories with checkpoints; the newest is taken, none starts from scratch. --out: parts
that travel and log.jsonl; --local: the full checkpoint with the optimiser's state. SIGTERM and the
end of the seconds both finish the step, save and leave. --out and --local hold the same kind of
checkpoint (`train/checkpoint.py`), without and with the optimiser's state.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from headrace.model.engram_tables import engram_tables
from headrace.model.spec import ModelSpec
from train import data as data_module
from train import indexer, parameters, selfcheck
from train.checkpoint import load_latest, save
from train.config import make_config
from train.data import Batch, Plan
from train.forward import Forward, Outcome
from train.geometry import GeometryMaker, random_cuts
from train.loader import Loaded, Shapes, Stream, random_batches
from train.optimiser import Optimiser, balance
from train.schedule import Stage, stage

LOG_EVERY = 20
SAVE_SECONDS = 120


@dataclass(slots=True)
class Counters:
    """What a checkpoint's meta.json holds. seconds: spent training, over all calls."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    short: int = 0
    long: int = 0


@dataclass(slots=True)
class Sums:
    """Losses since the last line of the log, kept on the device."""

    family: Tensor
    family_weight: Tensor
    index: dict[int, Tensor] = field(default_factory=dict)
    loads: dict[int, Tensor] = field(default_factory=dict)
    steps: int = 0
    waited: float = 0.0


class Trainer:
    """Model, optimiser, data and counters of one run."""

    def __init__(self, given: argparse.Namespace, config: Mapping[str, Any]) -> None:
        """given: the command line. config: config.json of the model, for `given.tokenizer`."""
        self.given = given
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        on_gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        self.spec = ModelSpec.from_config(config)
        self.counters = Counters()
        self.fresh_since = 0
        found = load_latest(given.resume, self.spec)
        masters = parameters.initial(self.spec, given.seed) if found is None else found.masters
        self.masters = {n: m.detach().to(self.device).float() for n, m in masters.items()}
        self.optimiser = Optimiser(self.masters, self.spec)
        if found is not None:
            known = asdict(self.counters)
            self.counters = Counters(**{k: found.meta[k] for k in known})
            self.fresh_since = self.counters.step
            if found.optimiser is not None:
                self.optimiser.restore(found.optimiser)
                self.fresh_since = found.meta.get("fresh_since", 0)
            say(resumed=self.counters.step, with_optimiser=found.optimiser is not None)
        self.kinds = parameters.kinds(self.spec)
        self.chunks = given.chunks
        self.forward = self._forward(on_gpu)
        tables = engram_tables(self.spec, given.tokenizer)
        self.geometry = GeometryMaker(self.spec, tables, self.device, torch.float32)
        self.generator = torch.Generator()
        rows = given.tokens // given.length
        self.shapes = {
            "short": Shapes(rows, given.length),
            "long": Shapes(max(1, given.tokens // given.long_length), given.long_length),
        }
        self.streams: dict[str, Stream] = {}
        self.log = (given.out / "log.jsonl").open("a", encoding="utf-8")
        self.sums = self._new_sums()

    def _forward(self, on_gpu: bool) -> Forward:
        if not on_gpu:
            return Forward(self.spec)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch._dynamo.config.cache_size_limit = 64
        core = selfcheck.fused_core(self.spec, self.device, self.dtype)
        if core is None:
            self.chunks = max(self.chunks, 16)
        fused = selfcheck.sinkhorn_works(self.spec, self.device)
        # From here on a piece that cannot be compiled runs as it is: slower, but it runs.
        torch._dynamo.config.suppress_errors = True
        return Forward(
            self.spec,
            fused_sinkhorn=fused,
            compiled=not self.given.no_compile,
            **({} if core is None else {"core": core}),
        )

    # --- data ----------------------------------------------------------------------------------

    def _stream(self, kind: str) -> Stream:
        if kind not in self.streams:
            given, start = self.given, getattr(self.counters, kind)
            shape = self.shapes[kind]
            batches: Iterator[Batch]
            if given.data == "random":
                batches = random_batches(shape, self.spec.vocab_size, given.seed, start)
            else:
                plan = Plan(length=shape.length, rows=shape.rows)
                if kind == "long":
                    plan = replace(
                        plan,
                        mix=dict(data_module.LONG_MIX),
                        recall=(1000, shape.length - 454),
                    )
                batches = data_module.batches(
                    plan,
                    given.tokenizer,
                    seed=given.seed,
                    english=given.english,
                    start=start,
                    workers=given.workers if kind == "short" else max(1, given.workers // 3),
                    ahead=1,
                )
            self.streams[kind] = Stream(batches, start, self.device)
        return self.streams[kind]

    # --- one step ------------------------------------------------------------------------------

    def step(self, now: Stage) -> None:
        """Draw a batch, apply its gradients, count."""
        long_row = now.long_every > 0 and self.counters.step % now.long_every == 0
        kind = "long" if long_row else "short"
        began = time.monotonic()
        batch = self._stream(kind).next()
        # By step, so that what is drawn does not depend on when the run was resumed.
        self.generator.manual_seed(self.given.seed * 1_000_003 + self.counters.step)
        self.sums.waited += time.monotonic() - began
        while True:
            try:
                loads = self._gradients(batch, now)
                break
            except torch.OutOfMemoryError:
                self.optimiser.adam.zero_grad(set_to_none=True)
                for master in self.masters.values():
                    master.grad = None
                torch.cuda.empty_cache()
                self.chunks *= 2
                say(out_of_memory_now_chunks=self.chunks)
                if self.chunks > 64:
                    raise
        self._clip()
        self.optimiser.step(now.rate)
        balance(self.masters, loads, min(1.0, now.rate), "layers")
        self.counters.step += 1
        self.counters.tokens += batch.ids.numel()
        setattr(self.counters, kind, batch.number + 1)
        self.sums.steps += 1
        if self.counters.step <= 3:
            self.sync()

    def _gradients(self, batch: Loaded, now: Stage) -> dict[int, Tensor]:
        """Backward of the whole batch in `chunks` parts; the experts' loads."""
        rows, length = batch.ids.shape
        chunks = min(self.chunks, rows)
        total = batch.weights[:, 1:].sum().clamp_min(1.0)
        loads: dict[int, Tensor] = {}
        count = 64 if length <= 2048 else 128
        sample = indexer.sampled_rows(length, count, self.generator).to(self.device)
        for part in torch.arange(rows).chunk(chunks):
            piece = slice(int(part[0]), int(part[-1]) + 1)
            positions = batch.positions[piece]
            cuts = random_cuts(positions, now.cuts, self.generator) if now.cuts else None
            geometry = self.geometry.make(batch.ids[piece], positions, cuts)
            p = parameters.working(self.masters, self.kinds, self.dtype, now.mode.rounded)
            outcome = self.forward(p, geometry, now.mode, index_sample=sample)
            weights = batch.weights[piece, 1:]
            assert outcome.token_losses is not None
            loss = (outcome.token_losses * weights).sum() / total
            for found in outcome.index_losses.values():
                loss = loss + found * (len(part) / rows)
            loss.backward()
            self._account(outcome, weights, batch.families[piece, 1:])
            for layer, load in outcome.loads.items():
                loads[layer] = loads.get(layer, 0.0) + load.detach()
        self.sums.loads = loads
        return loads

    def _clip(self) -> None:
        """Bound the gradients of what AdamW moves (Muon normalises by itself)."""
        gradients = [
            p.grad
            for group in self.optimiser.adam.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        factor = (1.0 / (norm + 1e-6)).clamp_max(1.0)
        torch._foreach_mul_(gradients, factor)

    # --- log and checkpoints -------------------------------------------------------------------

    def _new_sums(self) -> Sums:
        zeros = torch.zeros(len(data_module.FAMILY_NAMES) + 1, device=self.device)
        return Sums(zeros, zeros.clone())

    def _account(self, outcome: Outcome, weights: Tensor, families: Tensor) -> None:
        sums = self.sums
        counted = (weights > 0).float()
        assert outcome.token_losses is not None
        losses = (outcome.token_losses.detach() * counted).flatten()
        sums.family.index_add_(0, families.flatten(), losses)
        sums.family_weight.index_add_(0, families.flatten(), counted.flatten())
        for source, loss in outcome.index_losses.items():
            sums.index[source] = sums.index.get(source, 0.0) + loss.detach()

    def write_log(self, now: Stage, seconds: float) -> bool:
        """One line of the log; whether the losses are finite."""
        sums = self.sums
        means = (sums.family / sums.family_weight.clamp_min(1.0)).tolist()
        seen = sums.family_weight.tolist()
        names = (*data_module.FAMILY_NAMES, "other")
        line: dict[str, Any] = {
            "step": self.counters.step,
            "seconds": round(self.counters.seconds, 1),
            "phase": now.phase,
            "rate": round(now.rate, 4),
            "tokens": self.counters.tokens,
            "step_ms": round(1000 * seconds / max(1, sums.steps), 1),
            "waited_ms": round(1000 * sums.waited / max(1, sums.steps), 1),
            "loss": round(float(sums.family.sum() / sums.family_weight.sum().clamp_min(1.0)), 4),
            "families": {
                n: round(m, 4) for n, m, w in zip(names, means, seen, strict=True) if w > 0
            },
            "index": {s: round(float(v) / max(1, sums.steps), 4) for s, v in sums.index.items()},
            "load": {
                layer: round(float(load.max() / load.mean()), 2)
                for layer, load in sums.loads.items()
            },
        }
        if self.device.type == "cuda":
            line["memory_gb"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        self.sums = self._new_sums()
        self.log.write(json.dumps(line) + "\n")
        self.log.flush()
        print(json.dumps(line), flush=True)
        return line["loss"] == line["loss"]

    def save(self) -> None:
        """Both checkpoints."""
        meta = {**asdict(self.counters), "fresh_since": self.fresh_since}
        save(self.given.out / "checkpoint", self.masters, self.spec, meta)
        if self.given.local is not None:
            save(self.given.local, self.masters, self.spec, meta, self.optimiser.state())

    def sync(self) -> None:
        """Wait for the device, so that clocks mean something."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def run(self, stop: list[bool]) -> None:
        """Steps until the seconds are over or `stop` is set."""
        given = self.given
        started = logged = saved = time.monotonic()
        before = self.counters.seconds
        healthy = True
        while not stop and healthy:
            spent = time.monotonic() - started
            if spent >= given.seconds or self.counters.step >= given.steps:
                break
            self.counters.seconds = before + spent
            progress = min(1.0, self.counters.seconds / given.total)
            now = stage(progress, self.counters.step - self.fresh_since, given.phase)
            self.step(now)
            steps = self.counters.step
            if steps % LOG_EVERY == 0 or steps <= 3 or steps - self.fresh_since <= 3:
                healthy = self.write_log(now, time.monotonic() - logged)
                logged = time.monotonic()
            if healthy and time.monotonic() - saved > SAVE_SECONDS:
                self.save()
                saved = logged = time.monotonic()
        self.counters.seconds = before + time.monotonic() - started
        if healthy:
            self.save()
        self.log.close()
        say(done=True, healthy=healthy, **asdict(self.counters))


def say(**facts: Any) -> None:
    """A line for whoever watches."""
    print(json.dumps(facts), flush=True)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; `words` instead of the program's own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--total", type=float, default=1500.0)
    parser.add_argument("--steps", type=int, default=10**9, help="stop at this step at the latest")
    parser.add_argument("--resume", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--local", type=Path)
    parser.add_argument("--phase", choices=("auto", "1", "2", "3"), default="auto")
    parser.add_argument("--data", choices=("train", "random"), default="train")
    parser.add_argument("--english", type=Path)
    parser.add_argument(
        "--tokenizer", type=Path, default=Path("headrace/assets/tiny/tokenizer.json")
    )
    parser.add_argument("--tokens", type=int, default=139264, help="per step")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--long-length", type=int, default=8704)
    parser.add_argument("--chunks", type=int, default=1, help="parts of a batch, against memory")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args(words)


def main() -> None:
    """Entry point; leaves without waiting for the data processes."""
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    stop: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    Trainer(given, make_config(given.tokenizer)).run(stop)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
