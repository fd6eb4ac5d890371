"""A scheduler without a model: small blocks, tokens that depend on the position only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.core.output import TokenChunk
from headrace.engine.plan import StepPlan, StepResult
from headrace.engine.scheduler import NewRequest, RowHooks, Scheduler, SchedulerLimits
from headrace.engine.speculation.controller import Controller
from headrace.kv.manager import KVManager
from headrace.kv.pool import BlockPool
from headrace.kv.resume import ResumeRules

BLOCK = 4
STOP = 99
EXACT = ResumeRules("exact", keep=1, replay_rows=0, windows_suffice=False, block_tokens=BLOCK)


def make(
    blocks: int = 100,
    seqs: int = 4,
    rows: int = 16,
    waiting: int = 100,
    ageing: int = 256,
    resume: ResumeRules | None = None,
    hooks: RowHooks | None = None,
    controller: Controller | None = None,
    **limits: int,
) -> Scheduler:
    kv = KVManager(BlockPool(blocks + 1), seqs + 1, blocks, block_tokens=BLOCK)
    return Scheduler(
        kv,
        SchedulerLimits(
            max_num_seqs=seqs,
            max_num_batched_tokens=rows,
            max_waiting=waiting,
            max_tokens=blocks * BLOCK,
            ageing_steps=ageing,
            **limits,
        ),
        resume=resume,
        root_key=bytes(32),
        hooks=hooks,
        controller=controller,
    )


def request(name: str, prompt: int | Sequence[int], output: int, **more: Any) -> NewRequest:
    """`prompt`: its length, or its ids."""
    ids = np.arange(prompt) if isinstance(prompt, int) else np.array(prompt)
    return NewRequest(
        request_id=name,
        prompt=ids.astype(np.int32),
        length_limit=len(ids) + output,
        stop_ids=(STOP,),
        **more,
    )


def names(scheduler: Scheduler, plan: StepPlan) -> list[str]:
    """Request ids of the shares, "id/choice" for later choices."""
    pairs = [scheduler.sequence(row).name for row in plan.rows.tolist()]
    return [name if not choice else f"{name}/{choice}" for name, choice in pairs]


def shape(scheduler: Scheduler, plan: StepPlan | None) -> list[tuple[str, int, int, bool]]:
    """(name, q_start, q_len, samples) of each share."""
    assert plan is not None
    columns = (plan.q_start.tolist(), plan.q_len.tolist(), plan.samples.tolist())
    return list(zip(names(scheduler, plan), *columns, strict=True))


def result(plan: StepPlan, token: int = 7) -> StepResult:
    """Every sampling row draws `token`."""
    return StepResult(np.full(len(plan.sampling_rows), token, dtype=np.int64))


def drawn(plan: StepPlan, *tokens: int) -> StepResult:
    assert len(plan.sampling_rows) == len(tokens)
    return StepResult(np.array(tokens, dtype=np.int64))


def run(
    scheduler: Scheduler, token: int = 7, now: float = 0.0
) -> tuple[list[tuple[str, int, int, bool]], list[TokenChunk]]:
    """One step in which every sampling share draws `token`."""
    plan = scheduler.plan(now)
    assert plan is not None
    shares = shape(scheduler, plan)
    return shares, list(scheduler.commit(plan, result(plan, token), now))


def planned(scheduler: Scheduler, token: int = 7) -> list[str]:
    """Who runs in the next step, which is carried out."""
    return [name for name, *_ in run(scheduler, token)[0]]
