"""The flags of the command: defined, parsed, explained."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from blendjax.config import EngineConfig, MeshSpec
from blendjax.core import Sampling

FLAGS = flags.FlagValues()
_HELP = ("-h", "-help", "--help", "--helpfull", "--helpshort")
_METAVARS = {
    "input": "FILE",
    "output": "FILE",
    "model": "FILE",
    "mesh": "DxM",
    "report": "FILE",
    "plan_log": "FILE",
    "hardware": "NAME",
    "compile_cache": "DIR",
}


class UsageError(ValueError):
    """The command can't be meant like this."""


def _define() -> None:
    own: dict[str, Any] = {"flag_values": FLAGS}
    flags.DEFINE_string("input", None, "prompts, one JSON object a line (required)", **own)
    flags.DEFINE_string("output", None, "answers; default: input with .outputs.jsonl", **own)
    flags.DEFINE_string("model", None, "a .gguf file; default: the demo model", **own)
    flags.DEFINE_string("mesh", None, "data x model: DP ranks x TP shards", **own)
    flags.DEFINE_enum("policy", "dfs", ["dfs", "fcfs"], "order of admission", **own)
    flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "default: by platform", **own)
    flags.DEFINE_integer("max_model_len", None, "prompt + new tokens of a row", **own)
    flags.DEFINE_integer("max_tokens", None, "for rows that name none; default: what fits", **own)
    flags.DEFINE_integer("page_size", 16, "tokens of a KV page", **own)
    flags.DEFINE_integer("num_pages", None, "KV pages a data rank; default: by memory", **own)
    flags.DEFINE_integer("max_seqs", 128, "rows that run at once on a data rank", **own)
    flags.DEFINE_integer("step_tokens", 512, "tokens of a step on a data rank", **own)
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


def parse(argv: Sequence[str]) -> Any:
    """Flag values, or None if help is wanted. Dashes and underscores in names are alike."""
    if any(arg in _HELP for arg in argv[1:]):
        return None
    FLAGS.unparse_flags()
    try:
        rest = FLAGS([argv[0], *(_underscored(arg) for arg in argv[1:])])[1:]
    except flags.UnrecognizedFlagError as error:
        raise UsageError(_unknown(error.flagname)) from None
    except flags.Error as error:
        raise UsageError(str(error)) from None
    if rest:
        raise UsageError(f"what is {rest[0]!r}? arguments are flags: --input FILE")
    if not FLAGS.input:
        raise UsageError("--input FILE is required")
    return FLAGS


def _underscored(arg: str) -> str:
    """A known flag spelled with dashes as absl knows it; values are left alone."""
    name, equals, value = arg.partition("=")
    known = name.lstrip("-").replace("-", "_")
    is_flag = name.startswith("-") and (known in FLAGS or known.removeprefix("no") in FLAGS)
    return f"--{known}{equals}{value}" if is_flag else arg


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name.replace("-", "_"), list(FLAGS), n=1)
    hint = f"; did you mean --{_dashed(close[0])}?" if close else ""
    return f"unknown flag --{_dashed(name)}{hint}"


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def engine_config(flag: Any) -> EngineConfig:
    """What the flags say about the engine; raises ValueError for what no run could use."""
    if flag.limit is not None and flag.limit < 1:
        raise UsageError(f"--limit must be at least 1, got {flag.limit}")
    Sampling(max_tokens=flag.max_tokens)
    return EngineConfig(
        mesh=None if flag.mesh is None else MeshSpec.parse(flag.mesh),
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


def usage() -> Iterator[str]:
    """The lines of --help."""
    yield "usage: blendjax --input FILE [flags]      a file of prompts in, a file of answers out\n"
    for flag in FLAGS.flags_by_module_dict()[__name__]:
        default = "" if flag.default in (None, False) else f" (default: {flag.default})"
        yield f"  {_form(flag):<32}{flag.help.split('>: ')[-1]}{default}"
    yield "\nExit status: 0 all rows answered; 1 could not start, or broke off; 2 wrong usage;"
    yield "3 some rows failed (each has its error in the output); 4 interrupted."


def _form(flag: Any) -> str:
    dashes = "-" if len(flag.name) == 1 else "--"
    name = dashes + ("[no]" if flag.boolean and flag.default else "") + _dashed(flag.name)
    if flag.boolean:
        return name
    values = getattr(flag.parser, "enum_values", None)
    integer = flag.flag_type() == "int"
    return f"{name} {'|'.join(values) if values else 'N' if integer else _METAVARS[flag.name]}"
