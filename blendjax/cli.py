"""The main job as a command: a file of prompts in, a file of answers out."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from blendjax.config import EngineConfig, MeshSpec
from blendjax.core import PromptRow, RowError, Sampling
from blendjax.io.progress import Progress

FLAGS = flags.FlagValues()
_MAX_LISTED = 20  # row errors that are printed; all of them are in the output

OK, FAILED, USAGE, SOME_ROWS, INTERRUPTED = range(5)  # exit statuses


def _define() -> None:
    own = {"flag_values": FLAGS}
    flags.DEFINE_string("input", None, "prompts, one JSON object a line (required)", **own)
    flags.DEFINE_string(
        "output", None, "answers; default: the input's name + .outputs.jsonl", **own
    )
    flags.DEFINE_string("model", None, "a .gguf file; default: the demo model", **own)
    flags.DEFINE_string("mesh", None, "data x model: DP ranks x TP shards", **own)
    flags.DEFINE_enum("policy", "dfs", ["dfs", "fcfs"], "order in which rows are admitted", **own)
    flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "default: by platform", **own)
    flags.DEFINE_integer("max_model_len", None, "prompt + new tokens of a row", **own)
    flags.DEFINE_integer("max_tokens", None, "for rows that name none; default: what fits", **own)
    flags.DEFINE_integer("page_size", 16, "tokens of a KV page", **own)
    flags.DEFINE_integer("num_pages", None, "KV pages a data rank; default: by memory", **own)
    flags.DEFINE_integer("max_seqs", 128, "rows that run at once on a data rank", **own)
    flags.DEFINE_integer("step_tokens", 256, "tokens of a step on a data rank", **own)
    flags.DEFINE_integer("seed", 0, "of the run; a row's own seed comes first", **own)
    flags.DEFINE_integer("limit", None, "only the first N rows", **own)
    flags.DEFINE_bool("prefix_sharing", True, "compute a shared prefix once", **own)
    flags.DEFINE_bool("overwrite", False, "replace an output file that exists", **own)
    flags.DEFINE_bool("strict", False, "start only if every row is well-formed", **own)
    flags.DEFINE_string("report", None, "write counts, times and ratios as JSON", **own)
    flags.DEFINE_string("plan_log", None, "write what every step did as JSONL", **own)
    flags.DEFINE_enum("output_format", "openai", ["openai", "simple"], "form of the output", **own)
    flags.DEFINE_string("hardware", None, "chip of the cost model; default: by device", **own)
    flags.DEFINE_string("compile_cache", None, "directory of compiled steps; '' = none", **own)
    flags.DEFINE_enum("kernels", "reference", ["reference"], "attention kernels", **own)
    flags.DEFINE_bool("q", False, "errors only", **own)
    flags.DEFINE_bool("v", False, "a line every 10 s, and tracebacks", **own)


_define()


class UsageError(ValueError):
    """The command can't be meant like this."""


class Interrupted(BaseException):
    """SIGINT or SIGTERM: stop, keep what is written."""


def run() -> None:
    """Console entry point."""
    sys.exit(main(sys.argv))


def main(argv: Sequence[str]) -> int:
    """Run the command; gives the exit status of design section 7."""
    try:
        flag = _parse(argv)
        config = _config(flag)
    except (flags.Error, ValueError) as error:
        print(f"blendjax: {error}; see --help", file=sys.stderr)
        return USAGE
    if flag is None or config is None:
        return OK
    with Progress(quiet=flag.q, verbose=flag.v) as progress, _interruptible():
        try:
            return _infer(flag, config, progress)
        except Interrupted as stop:
            progress.error(f"blendjax: interrupted by {stop}; finished rows are in the output")
            return INTERRUPTED
        except UsageError as error:
            progress.error(f"blendjax: {error}")
            return USAGE
        except Exception as error:
            if flag.v:
                logging.exception("the run broke off")
            progress.close()
            progress.error(f"blendjax: {_last_line(error)}")
            return FAILED


def _last_line(error: Exception) -> str:
    text = str(error).strip() or "no message"
    known = type(error).__module__.startswith("blendjax")
    return text if known else f"{type(error).__name__}: {text} (-v shows where)"


def _parse(argv: Sequence[str]) -> Any:
    """Flag values; None after --help. Dashes and underscores in names are alike."""
    args = [argv[0], *(_underscored(arg) for arg in argv[1:])]
    if any(arg in ("-h", "--help", "-help", "--helpfull") for arg in args):
        print(f"usage: blendjax --input FILE [flags]\n{FLAGS.main_module_help()}")
        print(FLAGS.get_help())
        return None
    FLAGS.unparse_flags()
    rest = FLAGS(args)[1:]
    if rest:
        raise UsageError(f"what is {rest[0]!r}? arguments are flags: --input FILE")
    if not FLAGS.input:
        raise UsageError("--input FILE is required")
    return FLAGS


def _underscored(arg: str) -> str:
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _config(flag: Any) -> EngineConfig | None:
    if flag is None:
        return None
    if flag.limit is not None and flag.limit < 1:
        raise UsageError(f"--limit must be at least 1, got {flag.limit}")
    return EngineConfig(
        mesh=MeshSpec.parse(flag.mesh) if flag.mesh else None,
        policy=flag.policy,
        dtype=flag.dtype,
        page_size=flag.page_size,
        num_pages=flag.num_pages,
        max_seqs=flag.max_seqs,
        step_tokens=flag.step_tokens,
        max_model_len=flag.max_model_len,
        seed=flag.seed,
        prefix_sharing=flag.prefix_sharing,
        kernels=flag.kernels,
    )


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """The first SIGINT or SIGTERM raises `Interrupted`; a second one kills as usual."""

    def stop(number: int, _: Any) -> None:
        for each in old:
            signal.signal(each, signal.SIG_DFL)
        raise Interrupted(signal.Signals(number).name)

    old = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    for each in old:
        signal.signal(each, stop)
    try:
        yield
    finally:
        for each, handler in old.items():
            signal.signal(each, handler)


def _infer(flag: Any, config: EngineConfig, progress: Progress) -> int:
    from blendjax.io.rows import InputFileError, read_rows

    began = time.perf_counter()
    progress.phase(f"reading {flag.input}")
    path = Path(flag.input)
    read = lambda defaults: list(read_rows(path, defaults=defaults, limit=flag.limit))
    try:
        rows = read(Sampling(max_tokens=flag.max_tokens))
    except (InputFileError, ValueError) as error:
        raise UsageError(str(error)) from error
    if flag.strict:
        _refuse_bad(rows)
    from blendjax.offline import OfflineJob, Options  # only now: reading must not wait for jax

    options = Options(
        input=path,
        output=Path(flag.output) if flag.output else path.with_suffix(".outputs.jsonl"),
        model=flag.model,
        output_format=flag.output_format,
        overwrite=flag.overwrite,
        report=Path(flag.report) if flag.report else None,
        plan_log=Path(flag.plan_log) if flag.plan_log else None,
        hardware=flag.hardware,
        compile_cache=flag.compile_cache,
    )
    job = OfflineJob(options, config, progress=progress, read_s=time.perf_counter() - began)
    failed = job.run(rows, reread=read, flag_max_tokens=flag.max_tokens)
    return SOME_ROWS if failed else OK


def _refuse_bad(rows: Sequence[PromptRow | RowError]) -> None:
    bad = [row for row in rows if isinstance(row, RowError)]
    if bad:
        listed = [row.message for row in bad[:_MAX_LISTED]]
        more = len(bad) - len(listed)
        tail = [f"... and {more} more"] if more else []
        raise UsageError("\n".join([*listed, *tail, f"--strict: {len(bad)} bad rows, not started"]))
