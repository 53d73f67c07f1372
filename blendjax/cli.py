"""The main job as a command: a file of prompts in, a file of answers out."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blendjax.config import EngineConfig
from blendjax.core import PromptRow, RowError, Sampling
from blendjax.io.flags import UsageError, engine_config, parse, usage
from blendjax.io.interrupt import INTERRUPTED, Interrupt, Interrupted
from blendjax.io.progress import Progress
from blendjax.io.rows import InputFileError, read_rows
from blendjax.io.targets import OutputFileError, check_target, check_unused
from blendjax.sched.hardware import CHIPS

OK, FAILED, USAGE, SOME_ROWS = range(4)  # exit statuses, and INTERRUPTED
_MAX_LISTED = 20  # bad rows that --strict prints
_MAX_SHOWN = 300  # characters of an error in one line


def run() -> None:
    """Console entry point."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # after `2>&-` a file of ours would become stderr, and libraries write there
    os.close(fd)
    status = main(sys.argv)
    if status == INTERRUPTED:
        os._exit(status)  # now, not when loading and compiling threads are done
    sys.exit(status)


def main(argv: Sequence[str]) -> int:
    """Run the command; gives the exit status of design section 7."""
    try:
        flag = parse(argv)
        if flag is None:
            print(*usage(), sep="\n")
            return OK
        config = engine_config(flag)
    except ValueError as error:
        Progress().error(f"blendjax: {error}; see --help")
        return USAGE
    with Progress(quiet=flag.q, verbose=flag.v) as progress:
        try:
            with Interrupt() as interrupt:
                return _infer(flag, config, progress, interrupt)
        except Interrupted as stop:
            progress.close()
            progress.error(f"blendjax: interrupted by {stop}")
            return INTERRUPTED
        except UsageError as error:
            progress.error(f"blendjax: {error}")
            return USAGE
        except Exception as error:
            progress.close()
            if flag.v:
                progress.error(traceback.format_exc().rstrip())
            progress.error(f"blendjax: {_in_a_line(error)}")
            return FAILED


def _in_a_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    if type(error).__module__.startswith("blendjax"):
        return text
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        advice = "out of memory: try a smaller --num-pages, --max-seqs, --step-tokens or --mesh"
        return f"{advice} ({text[:_MAX_SHOWN]})"
    return f"{type(error).__name__}: {text[:_MAX_SHOWN]} (-v shows where)"


def _infer(flag: Any, config: EngineConfig, progress: Progress, interrupt: Interrupt) -> int:
    began = time.perf_counter()
    progress.phase(f"reading {flag.input}")
    path = Path(flag.input)
    output = Path(flag.output) if flag.output else path.parent / f"{path.stem}.outputs.jsonl"
    read = lambda defaults: list(read_rows(path, defaults=defaults, limit=flag.limit))
    try:
        _check_files(flag, path, output)
        rows = read(Sampling(max_tokens=flag.max_tokens))
    except (InputFileError, OutputFileError) as error:
        raise UsageError(str(error)) from error
    _tell_bad(rows, progress, strict=flag.strict)
    from blendjax.offline import OfflineJob, Options  # only now: reading must not wait for jax

    options = Options(
        input=path,
        output=output,
        model=flag.model,
        output_format=flag.output_format,
        overwrite=flag.overwrite,
        report=Path(flag.report) if flag.report else None,
        plan_log=Path(flag.plan_log) if flag.plan_log else None,
        hardware=flag.hardware,
        compile_cache=flag.compile_cache,
    )
    job = OfflineJob(options, config, progress=progress, interrupt=interrupt, began_s=began)
    try:
        failed = job.run(rows, reread=read, flag_max_tokens=flag.max_tokens)
    except Interrupted as stop:
        raise Interrupted(f"{stop}: {job.written} of {len(rows)} rows are in {output}") from stop
    return SOME_ROWS if failed else OK


def _check_files(flag: Any, path: Path, output: Path) -> None:
    """Everything the flags name that a look can refuse, before any time is spent."""
    if flag.hardware is not None and flag.hardware not in CHIPS:
        raise UsageError(f"--hardware {flag.hardware}: known chips are {', '.join(CHIPS)}")
    if flag.model is not None and Path(flag.model).is_dir():
        raise UsageError(f"--model {flag.model} is a directory: give one .gguf file")
    taken = {"input": path}
    check_target(output, "output", taken)
    if not flag.overwrite:
        check_unused(output)
    for name in ("report", "plan_log"):
        if flag[name].value:
            taken = taken | {"output": output}
            check_target(Path(flag[name].value), name.replace("_", "-"), taken)
            taken[name] = Path(flag[name].value)


def _tell_bad(rows: Sequence[PromptRow | RowError], progress: Progress, *, strict: bool) -> None:
    """The first bad row at once, before the model loads; with `strict` that is the end."""
    bad = [row.message[:_MAX_SHOWN] for row in rows if isinstance(row, RowError)]
    if bad and strict:
        more = len(bad) - _MAX_LISTED
        tail = [f"... and {more} more"] if more > 0 else []
        last = f"--strict: {len(bad)} of {len(rows)} rows are bad, nothing was started; mend them"
        raise UsageError("\n".join([*bad[:_MAX_LISTED], *tail, f"blendjax: {last}"]))
    if bad:
        progress.phase(f"{len(bad)} of {len(rows)} rows are bad and will fail; first: {bad[0]}")
