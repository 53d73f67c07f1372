"""Plan, launch, commit: the loop that keeps the device one step ahead of the host."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

import numpy as np

from blendjax.engine.runner import Runner
from blendjax.sched.batcher import Batcher, Commit, Ended
from blendjax.sched.plan import StepPlan


class StuckError(RuntimeError):
    """Rows wait, nothing runs and nothing can be admitted."""


@dataclasses.dataclass(slots=True)
class LoopStats:
    """Counts of a run, filled while it goes."""

    steps: int = 0
    rows_launched: int = 0  # token rows that did work
    rows_padded: int = 0  # token rows of the shapes that ran
    stray: int = 0
    host_s: float = 0.0  # plan, pack and commit: the host's own time

    @property
    def padding_fraction(self) -> float:
        return 1 - self.rows_launched / self.rows_padded if self.rows_padded else 0.0

    def add(self, plan: StepPlan) -> None:
        self.steps += 1
        self.rows_launched += sum(part.tokens for part in plan.ranks)
        self.rows_padded += plan.bucket.tokens * len(plan.ranks)


Observer = Callable[[StepPlan, Commit], None]
Pause = Callable[[], None]


def drive(
    batcher: Batcher, runner: Runner, stats: LoopStats, *, observe: Observer, pause: Pause
) -> Iterator[list[Ended]]:
    """Launch step k + 1 before reading step k, so that the device never waits for the host.

    `pause` is called between steps, when all rows that have ended were yielded: it may raise.
    """
    flying = None
    while batcher.unfinished or flying is not None:
        pause()
        began = time.perf_counter()
        plan = batcher.next_step() if batcher.unfinished else None
        stats.host_s += time.perf_counter() - began
        if plan is None and flying is None:
            raise StuckError(f"{batcher.unfinished} rows wait and none can be admitted")
        launched = None if plan is None else (plan, runner.launch(plan))
        if flying is not None:
            drawn = runner.fetch(flying[1])
            yield _commit(batcher, flying[0], drawn, stats, observe)
        flying = launched


def _commit(
    batcher: Batcher,
    plan: StepPlan,
    drawn: tuple[np.ndarray, np.ndarray],
    stats: LoopStats,
    observe: Observer,
) -> list[Ended]:
    began = time.perf_counter()
    commit = batcher.commit(plan, *drawn)
    stats.host_s += time.perf_counter() - began
    stats.add(plan)
    stats.stray += sum(commit.stray)
    observe(plan, commit)
    return commit.ended
