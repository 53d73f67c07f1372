"""The plan log of a run as a file: whole steps, whatever ends the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from blendjax.engine.llm import Run
from blendjax.io.results import encode_line
from blendjax.io.targets import writing
from blendjax.sched import planlog
from blendjax.sched.cost import CostModel
from blendjax.sched.plan import Commit, StepPlan

LogStep = Callable[[StepPlan, Commit], None]


@contextlib.contextmanager
def plan_log(path: Path | None, run: Run, cost: CostModel, *, workload: str) -> Iterator[LogStep]:
    """Gives what writes a step to the log, if one was asked for; raises `OutputFileError`."""
    if path is None:
        yield lambda plan, commit: None
        return
    with writing(path, "plan-log"):
        file = path.open("wb", buffering=0)

    def write(records: Iterable[dict[str, Any]]) -> None:
        with writing(path, "plan-log"):
            file.write(b"".join(map(encode_line, records)))

    config = run.llm.config
    head = planlog.header(
        cost,
        ranks=run.llm.mesh_spec.data,
        policy=config.policy,
        page_size=config.page_size,
        pages_per_rank=run.num_pages - 1,
        workload=workload,
        seed=config.seed,
    )
    with file:
        write([head])
        yield lambda plan, commit: write(planlog.records(plan, commit, cost))
