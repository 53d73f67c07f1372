"""What `scripts/offline_infer.py` does, once flags and rows are read: model up, rows through, files out."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from blendjax.config import EngineConfig
from blendjax.core import Completion, PromptRow, RowError, Sampling
from blendjax.engine.compile_cache import CompileCounter, use_compile_cache
from blendjax.engine.llm import LLM, Run
from blendjax.io import report as report_parts
from blendjax.io.progress import Progress
from blendjax.io.results import OutputFormat, ResultWriter, encode_line
from blendjax.sched import planlog
from blendjax.sched.batcher import Commit
from blendjax.sched.cost import CostModel, Work
from blendjax.sched.hardware import CHIPS, hardware_for
from blendjax.sched.plan import StepPlan

Rows = Sequence[PromptRow | RowError]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Files and forms of a run; what the engine does is in `EngineConfig`."""

    input: Path
    output: Path
    model: str | None
    output_format: OutputFormat
    overwrite: bool
    report: Path | None
    plan_log: Path | None
    hardware: str | None
    compile_cache: str | None


class OfflineJob:
    """One run of the command, from open model to written report."""

    def __init__(
        self, options: Options, config: EngineConfig, *, progress: Progress, read_s: float
    ) -> None:
        if options.hardware is not None and options.hardware not in CHIPS:
            raise ValueError(f"--hardware {options.hardware}: known chips are {', '.join(CHIPS)}")
        self._options, self._config, self._progress = options, config, progress
        self._read_s, self._began = read_s, time.perf_counter() - read_s
        self._compiles = CompileCounter()
        self._done_planned = 0
        self._computed = 0
        self._reasons: Counter[str] = Counter()

    def run(
        self, rows: Rows, *, reread: Callable[[Sampling], Rows], flag_max_tokens: int | None
    ) -> int:
        """Answer every row; gives the number of rows that failed."""
        progress, options = self._progress, self._options
        cache_note = use_compile_cache(options.compile_cache)
        if cache_note:
            progress.phase(cache_note)
        progress.phase(f"loading {options.model or 'the demo model'}")
        llm = LLM(options.model, self._config, say=progress.phase)
        defaults = dataclasses.replace(llm.sampling_defaults, max_tokens=flag_max_tokens)
        if defaults != Sampling(max_tokens=flag_max_tokens):
            rows = reread(defaults)
        progress.phase(
            f"{llm.model.name}: {llm.model.params / 1e6:.0f}M parameters, {llm.dtype}, "
            f"mesh {llm.mesh_spec} on {llm.devices.note}, kernels {self._config.kernels}"
        )
        progress.phase(f"for rows that name none (row > flag > model > built-in): {_say(defaults)}")
        with ResultWriter(
            options.output,
            model=llm.model.name,
            output_format=options.output_format,
            overwrite=options.overwrite,
            input_path=options.input,
        ) as writer:
            run = llm.start(rows)
            self._write_all(run, writer)
            report = self._report(run, writer)
        if options.report is not None:
            report_parts.write_report(options.report, report)
        progress.finish(self._summary(run, report))
        return writer.failed

    def _write_all(self, run: Run, writer: ResultWriter) -> None:
        job = run.job
        planned = sum(len(r.prompt_T) + r.max_new - 1 for r in job.requests)
        self._progress.phase(
            f"{len(job.requests)} rows to run, {len(job.errors)} refused; "
            f"{sum(len(r.prompt_T) for r in job.requests):,} prompt tokens, "
            f"{run.tree.distinct_tokens:,} distinct"
        )
        run.warm()
        self._progress.start(len(job.requests) + len(job.errors), planned)
        self._compiles.reset()
        with self._plan_log(run) as log:
            watch = lambda plan, commit: self._watch(run, log, writer, plan, commit)
            for answer in run.answers(watch):
                self._take(answer, writer)

    def _take(self, answer: Completion | RowError, writer: ResultWriter) -> None:
        if isinstance(answer, RowError):
            writer.error(answer)
            return
        writer.completion(answer)
        self._reasons[answer.finish_reason] += 1
        unspent = answer.request.max_new - len(answer.token_ids)
        self._done_planned += answer.cached_tokens + unspent

    def _watch(
        self,
        run: Run,
        log: Callable[[StepPlan, Commit], None],
        writer: ResultWriter,
        plan: StepPlan,
        commit: Commit,
    ) -> None:
        log(plan, commit)
        tokens = sum(part.tokens for part in plan.ranks)
        self._computed += tokens
        self._done_planned += tokens
        ranks = run.batcher.ranks
        self._progress.update(
            writer.completed + writer.failed,
            self._computed,
            self._done_planned,
            running=run.batcher.running,
            waiting=run.batcher.unfinished - run.batcher.running,
            page_use=sum(r.used_pages for r in ranks) / sum(r.pool.capacity for r in ranks),
        )

    def _cost(self, run: Run) -> CostModel:
        llm = run.llm
        device = llm.devices.mesh.devices.flat[0]
        name = self._options.hardware
        chip = CHIPS[name] if name else hardware_for(device.device_kind) or CHIPS["cpu"]
        return CostModel(llm.model, llm.layout, chip, llm.dtype.itemsize)

    @contextlib.contextmanager
    def _plan_log(self, run: Run) -> Iterator[Callable[[StepPlan, Commit], None]]:
        """Gives what writes a step to the log, if one was asked for."""
        path, config = self._options.plan_log, self._config
        if path is None:
            yield lambda plan, commit: None
            return
        cost = self._cost(run)
        with path.open("wb") as file:
            head = planlog.header(
                cost,
                ranks=run.llm.mesh_spec.data,
                policy=config.policy,
                page_size=config.page_size,
                pages_per_rank=run.num_pages - 1,
                workload=self._options.input.name,
                seed=config.seed,
            )
            file.write(encode_line(head))
            yield lambda plan, commit: _log_step(file, plan, commit, cost)

    def _counts(self, run: Run, writer: ResultWriter) -> report_parts.RunCounts:
        sums = [sum(column) for column in zip(*run.ended, strict=True)] or [0] * 4
        return report_parts.RunCounts(
            rows=writer.completed + writer.failed,
            completed=writer.completed,
            failed=writer.failed,
            prompt=sums[0],
            generated=sums[1],
            prompt_cached=sums[2],
            recomputed=sums[3],
            distinct_prompt=run.tree.distinct_tokens,
        )

    def _report(self, run: Run, writer: ResultWriter) -> dict[str, Any]:
        llm, stats, counts = run.llm, run.stats, self._counts(run, writer)
        cost = self._cost(run)
        work = Work.of(
            [e[0] for e in run.ended],
            [e[1] for e in run.ended],
            distinct_prompt_tokens=min(counts.distinct_prompt, counts.prompt),
            ranks=llm.mesh_spec.data,
        )
        pool_bytes = (run.num_pages - 1) * self._config.page_size * cost.kv_token_bytes
        bound_s = cost.bound_s(work, pool_bytes) if run.ended else 0.0
        seconds = {
            "read": self._read_s,
            "load": llm.load_s,
            "compile": run.compile_s,
            "plan": run.plan_s,
            "run": run.run_s,
            "total": time.perf_counter() - self._began,
        }
        return {
            "rows": {
                "total": counts.rows,
                "completed": counts.completed,
                "failed": counts.failed,
                "resumed": 0,
            },
            "tokens": report_parts.tokens(counts),
            "time_s": {name: round(value, 3) for name, value in seconds.items()},
            "throughput": report_parts.throughput(counts, run.run_s),
            "schedule": {
                "policy": self._config.policy,
                "steps": stats.steps,
                **report_parts.sharing(counts),
                "padding_fraction": round(stats.padding_fraction, 4),
                "bound_s": round(bound_s, 3),
                "percent_of_bound": round(100 * bound_s / run.run_s, 2) if run.run_s else 0.0,
                "preemptions": run.preemptions,
                "host_ms_per_step": round(1e3 * stats.host_s / max(stats.steps, 1), 3),
                "stray_tokens": stats.stray,
                "shortened_rows": run.job.shortened,
            },
            "compiles": {"warmup": run.compiles, "after_warmup": self._compiles.count},
            "mesh": str(llm.mesh_spec),
            "devices": llm.devices.note,
            "model": llm.model.name,
            "dtype": str(llm.dtype),
            "kernels": self._config.kernels,
            "hardware": cost.hardware.name,
            "fingerprint": self._fingerprint(llm),
            "versions": report_parts.versions(),
        }

    def _fingerprint(self, llm: LLM) -> str:
        """Of all that decides the text: input file, model, dtype and seed."""
        digest = hashlib.sha256(self._options.input.read_bytes())
        digest.update(f"{llm.model}|{llm.dtype}|{self._config.seed}".encode())
        return digest.hexdigest()[:16]

    def _summary(self, run: Run, report: dict[str, Any]) -> Iterator[str]:
        rows, tokens, rate = report["rows"], report["tokens"], report["throughput"]
        schedule, seconds = report["schedule"], report["time_s"]
        cut = self._reasons["length"]
        yield (
            f"{rows['completed']} rows answered ({cut} cut off by length), {rows['failed']} failed "
            f"-> {self._options.output}"
        )
        yield (
            f"{tokens['prompt']:,} prompt tokens ({tokens['prompt_cached']:,} from shared prefixes), "
            f"{tokens['generated']:,} generated; {rate['output_tok_s']:,.0f} output tok/s, "
            f"{rate['total_tok_s']:,.0f} in all"
        )
        yield (
            f"{schedule['steps']} steps, {schedule['padding_fraction']:.0%} padding, "
            f"{schedule['preemptions']} preemptions, {schedule['host_ms_per_step']:.2f} ms of host "
            f"time a step, {schedule['percent_of_bound']:.0f}% of the bound for {report['hardware']}"
        )
        parts = ", ".join(f"{name} {seconds[name]:.1f}" for name in seconds if name != "total")
        yield f"{seconds['total']:.1f} s: {parts}"
        if run.job.shortened:
            yield f"note: {run.job.shortened} rows asked for more tokens than fit behind their prompt"
        for text, count in sorted(run.llm.codec.warnings.items()):
            yield f"note: {count} rows: {text}"


def _log_step(file: BinaryIO, plan: StepPlan, commit: Commit, cost: CostModel) -> None:
    file.writelines(encode_line(record) for record in planlog.records(plan, commit, cost))


def _say(defaults: Sampling) -> str:
    most = "what the context leaves" if defaults.max_tokens is None else str(defaults.max_tokens)
    return (
        f"max_tokens {most}, temperature {defaults.temperature}, top_p {defaults.top_p}, "
        f"top_k {defaults.top_k}, min_p {defaults.min_p}"
    )
