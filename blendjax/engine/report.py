"""What a run came to: the parts of the report (design section 7) that the engine knows."""

from __future__ import annotations

from typing import Any

from blendjax.engine.llm import LLM, Run
from blendjax.io import report as parts
from blendjax.sched.cost import CostModel, Work
from blendjax.sched.hardware import CHIPS, UNKNOWN, hardware_for


def cost_model(llm: LLM, hardware: str | None) -> CostModel:
    """Of a chip by its name in CHIPS, else of the device in use."""
    device = llm.devices.mesh.devices.flat[0]
    chip = CHIPS[hardware] if hardware else hardware_for(device.device_kind) or UNKNOWN
    return CostModel(llm.model, llm.layout, chip, llm.dtype.itemsize)


def run_report(run: Run, cost: CostModel) -> dict[str, Any]:
    """Tokens, seconds, ratios and names of a finished run."""
    llm, counts = run.llm, _counts(run)
    return {
        "tokens": parts.tokens(counts),
        "time_s": {
            "load": round(llm.load_s, 3),
            "compile": round(run.compile_s, 3),
            "plan": round(run.plan_s, 3),
            "run": round(run.run_s, 3),
        },
        "throughput": parts.throughput(counts, run.run_s),
        "schedule": _schedule(run, cost, counts),
        "mesh": str(llm.mesh_spec),
        "devices": llm.devices.note,
        "model": llm.model.name,
        "dtype": str(llm.dtype),
        "kernels": llm.config.kernels,
        "hardware": cost.hardware.name,
    }


def _counts(run: Run) -> parts.TokenCounts:
    prompt, generated, cached, recomputed = [
        sum(column) for column in zip(*run.ended, strict=True)
    ] or [0] * 4
    return parts.TokenCounts(
        prompt=prompt,
        generated=generated,
        prompt_cached=cached,
        recomputed=recomputed,
        distinct_prompt=run.tree.distinct_tokens,
    )


def _schedule(run: Run, cost: CostModel, counts: parts.TokenCounts) -> dict[str, Any]:
    stats, bound_s = run.stats, _bound_s(run, cost, counts)
    return {
        "policy": run.llm.config.policy,
        "steps": stats.steps,
        **parts.sharing(counts),
        "padding_fraction": round(stats.padding_fraction, 4),
        "bound_s": round(bound_s, 3),
        "percent_of_bound": round(100 * bound_s / run.run_s, 2) if run.run_s else 0.0,
        "preemptions": run.preemptions,
        "host_ms_per_step": round(1e3 * stats.host_s / max(stats.steps, 1), 3),
        "stray_tokens": stats.stray,
        "shortened_rows": run.job.shortened,
    }


def _bound_s(run: Run, cost: CostModel, counts: parts.TokenCounts) -> float:
    if not run.ended:
        return 0.0
    work = Work.of(
        [ended[0] for ended in run.ended],
        [ended[1] for ended in run.ended],
        tree=run.tree,
        ranks=run.llm.mesh_spec.data,
    )
    pool_bytes = (run.num_pages - 1) * run.llm.config.page_size * cost.kv_token_bytes
    return cost.bound_s(work, pool_bytes)
