"""What `scripts/offline_infer.py` does with the rows it read: model up, rows through, files out."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from blendjax.config import EngineConfig, SettingError
from blendjax.core import Completion, PromptRow, RowError, Sampling
from blendjax.engine.compile_cache import CompileCounter, use_compile_cache
from blendjax.engine.llm import LLM, Run
from blendjax.engine.mesh import MeshError
from blendjax.engine.plan_file import LogStep, plan_log
from blendjax.engine.report import cost_model, run_report
from blendjax.io import report as report_parts
from blendjax.io.flags import UsageError
from blendjax.io.interrupt import Interrupt
from blendjax.io.progress import Progress
from blendjax.io.results import OutputFormat, ResultWriter
from blendjax.model.find import find_model
from blendjax.model.loader import CheckpointError
from blendjax.sched.plan import Commit, StepPlan

Rows = Sequence[PromptRow | RowError]
_MAX_SHOWN = 3  # failed rows in the summary; all of them are in the output


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
    hardware: str | None  # a name of CHIPS
    compile_cache: str | None


class OfflineJob:
    """One run of the command, from open model to written report."""

    def __init__(
        self,
        options: Options,
        config: EngineConfig,
        *,
        progress: Progress,
        interrupt: Interrupt,
        began_s: float,
    ) -> None:
        """The clock runs since `began_s`."""
        self._options, self._config, self._progress = options, config, progress
        self._interrupt, self._began_s = interrupt, began_s
        self._read_s = time.perf_counter() - began_s
        self._compiles = CompileCounter()
        self._done_planned = 0
        self._computed = 0
        self._reasons: Counter[str] = Counter()
        self._errors: list[str] = []  # of the first rows that failed
        self.written = 0  # lines in the output

    def run(
        self, rows: Rows, *, reread: Callable[[Sampling], Rows], flag_max_tokens: int | None
    ) -> int:
        """Answer every row; gives the number of rows that failed."""
        progress, options = self._progress, self._options
        cache_note = use_compile_cache(options.compile_cache)
        if cache_note:
            progress.phase(cache_note)
        progress.phase(f"loading {options.model or 'the demo model'}")
        llm = self._open_model()
        defaults = dataclasses.replace(llm.sampling_defaults, max_tokens=flag_max_tokens)
        if defaults != Sampling(max_tokens=flag_max_tokens):
            rows = reread(defaults)
        model = (llm.model, llm.source, llm.dtype, llm.max_model_len)
        fingerprint = report_parts.fingerprint(options.input, *model, defaults, self._config.seed)
        progress.phase(
            f"{llm.model.name}: {llm.model.params / 1e6:.3g}M parameters, {llm.dtype}, "
            f"mesh {llm.mesh_spec} on {llm.devices.note}, kernels {self._config.kernels}"
        )
        progress.phase(f"for rows that name none (row > flag > model > built-in): {_say(defaults)}")
        run = self._start(llm, rows)
        with ResultWriter(
            options.output,
            model=llm.model.name,
            output_format=options.output_format,
            overwrite=options.overwrite,
            input_path=options.input,
        ) as writer:
            self._write_all(run, writer)
            report = self._report(run, writer) | {"fingerprint": fingerprint}
        progress.finish(self._summary(run, report))
        if options.report is not None:
            report_parts.write_report(options.report, report)
        return writer.failed

    def _open_model(self) -> LLM:
        name = self._options.model
        try:
            find_model(name)
            self._interrupt.check()
            return LLM(name, self._config, say=self._progress.phase)
        except (MeshError, SettingError) as error:
            raise UsageError(str(error)) from error
        except CheckpointError as error:
            if name is not None and not Path(name).is_file():
                raise UsageError(f"--model {error}") from error
            raise

    def _start(self, llm: LLM, rows: Rows) -> Run:
        """Everything that may fail before the first row runs; the output is not touched yet."""
        self._progress.phase(f"encoding {len(rows):,} rows, compiling the steps they need")
        run = llm.start(rows)
        job, prompts = run.job, sum(len(r.prompt_T) for r in run.job.requests)
        self._progress.phase(
            f"{len(job.requests):,} rows to run, {len(job.errors):,} refused; "
            f"{prompts:,} prompt tokens, {run.tree.distinct_tokens:,} distinct"
        )
        run.warm()
        planned = prompts + sum(r.max_new - 1 for r in job.requests)
        self._progress.start(len(job.requests) + len(job.errors), planned)
        self._compiles.reset()
        return run

    def _write_all(self, run: Run, writer: ResultWriter) -> None:
        options = self._options
        cost = cost_model(run.llm, options.hardware)
        log_to = plan_log(options.plan_log, run, cost, workload=options.input.name)
        with self._interrupt.deferred(), log_to as log:
            watch = lambda plan, commit: self._watch(run, log, plan, commit)
            for answer in run.answers(watch, self._interrupt.check):
                self._take(answer, writer)

    def _take(self, answer: Completion | RowError, writer: ResultWriter) -> None:
        if isinstance(answer, RowError):
            writer.error(answer)
            self._errors += [answer.message] if len(self._errors) < _MAX_SHOWN else []
        else:
            writer.completion(answer)
            self._reasons[answer.finish_reason] += 1
            unspent = answer.request.max_new - len(answer.token_ids)
            self._done_planned += answer.cached_tokens + unspent
        self.written = writer.completed + writer.failed

    def _watch(self, run: Run, log: LogStep, plan: StepPlan, commit: Commit) -> None:
        log(plan, commit)
        tokens = sum(part.tokens for part in plan.ranks)
        self._computed += tokens
        self._done_planned += tokens
        ranks = run.batcher.ranks
        self._progress.update(
            self.written,
            self._computed,
            self._done_planned,
            running=run.batcher.running,
            waiting=run.batcher.unfinished - run.batcher.running,
            page_use=sum(r.used_pages for r in ranks) / sum(r.pool.capacity for r in ranks),
        )

    def _report(self, run: Run, writer: ResultWriter) -> dict[str, Any]:
        report = run_report(run, cost_model(run.llm, self._options.hardware))
        done, failed = writer.completed, writer.failed
        total_s = time.perf_counter() - self._began_s
        report["time_s"] = {"read": round(self._read_s, 3), **report["time_s"]}
        report["time_s"]["total"] = round(total_s, 3)
        rows = {"total": done + failed, "completed": done, "failed": failed, "resumed": 0}
        compiles = {"warmup": run.compiles, "after_warmup": self._compiles.count}
        versions = report_parts.versions()
        return {"rows": rows, **report, "compiles": compiles, "versions": versions}

    def _summary(self, run: Run, report: dict[str, Any]) -> Iterator[str]:
        cut = self._reasons["length"]
        yield from report_parts.summary(report, output=self._options.output, cut=cut)
        yield from (f"failed: {message[:200]}" for message in self._errors)
        if (more := report["rows"]["failed"] - len(self._errors)) > 0:
            yield f"failed: {more} more rows; each has its error in the output"
        if run.job.shortened:
            yield f"note: {run.job.shortened} rows asked for more tokens than fit after the prompt"
        for text, count in sorted(run.llm.codec.warnings.items()):
            yield f"note: {count} rows: {text}"


def _say(defaults: Sampling) -> str:
    most = "what the context leaves" if defaults.max_tokens is None else str(defaults.max_tokens)
    return (
        f"max_tokens {most}, temperature {defaults.temperature}, top_p {defaults.top_p}, "
        f"top_k {defaults.top_k}, min_p {defaults.min_p}"
    )
