"""The plan log (design section 7): one JSON line a step and rank, from which time, sharing and
occupancy can be recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from blendjax.sched.batcher import Commit
from blendjax.sched.cost import CostModel
from blendjax.sched.plan import Sequence, StepPlan


def header(cost: CostModel, *, ranks: int, **run: Any) -> dict[str, Any]:
    """The first line; `run` adds policy, page_size, pages_per_rank, workload and seed."""
    hw = cost.hardware
    return {
        "version": 1,
        "model": cost.model.name,
        "hardware": hw.name,
        "tp": cost.layout.shards,
        "dp": ranks,
        "overlap": "serial",
        "constants": {
            "F": hw.flops_per_s,
            "BW": hw.bytes_per_s,
            "link": hw.link_bytes_per_s,
            "W": cost.weight_bytes,
            "kv": cost.kv_token_bytes,
            "P_active": cost.active_params,
            "L": cost.model.num_layers,
            "hidden": cost.model.hidden,
            "H_q": cost.model.num_heads,
            "head_dim": cost.model.head_dim,
            "eff_c": 1.0,
            "eff_m": 1.0,
        },
        **run,
    }


def records(plan: StepPlan, commit: Commit, cost: CostModel) -> Iterator[dict[str, Any]]:
    """A line for each rank of a step that has just been read back. A row whose last token was in
    flight when it was preempted has ended instead."""
    ended = {ended.seq.row: ended.seq.rank for ended in commit.ended}
    step_s = max(cost.serial_s(cost.rank_step(part)) for part in plan.ranks)
    for part in plan.ranks:
        demand = cost.rank_step(part)
        finished = [seq for _, seq in part.draws() if ended.get(seq.row) == part.rank]
        yield {
            "step": plan.step,
            "rank": part.rank,
            "admit": [[*_name(seq), cached] for seq, cached in part.admits],
            "prefill": [[*_name(c.seq), c.start, c.length] for c in part.chunks],
            "finish": [_name(seq) for seq in finished],
            "preempt": [_name(seq) for seq in part.preempts if not seq.ended],
            "idle": [_name(seq) for seq in part.idles],
            "stray": commit.stray[part.rank],
            "compute_s": demand.compute_s,
            "memory_s": demand.memory_s,
            "time_s": step_s,
        }


def _name(seq: Sequence) -> list[int]:
    """[row of the input, sample]."""
    return [seq.request.index, 0]
