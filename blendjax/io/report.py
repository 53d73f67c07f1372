"""The run's report (design section 7): one JSON object of counts, seconds and ratios."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from blendjax.io.targets import writing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Tokens of a run, summed over rows."""

    prompt: int
    prompt_cached: int
    recomputed: int
    generated: int
    distinct_prompt: int  # of the prefix tree: the least that must be computed


def throughput(counts: TokenCounts, run_s: float) -> dict[str, float]:
    """Tokens a second of the run proper; `total` counts prompt tokens found in the cache too."""
    rate = lambda tokens: round(tokens / run_s, 2) if run_s > 0 else 0.0
    return {
        "total_tok_s": rate(counts.prompt + counts.generated),
        "output_tok_s": rate(counts.generated),
    }


def tokens(counts: TokenCounts) -> dict[str, int]:
    return {
        "prompt": counts.prompt,
        "prompt_cached": counts.prompt_cached,
        "prompt_computed": counts.prompt - counts.prompt_cached,
        "recomputed": counts.recomputed,
        "generated": counts.generated,
    }


def sharing(counts: TokenCounts) -> dict[str, float]:
    """Shares of all prompt tokens that were, and could have been, found in shared prefixes."""
    whole = max(counts.prompt, 1)
    return {
        "sharing": round(counts.prompt_cached / whole, 4),
        "sharing_max": round(1 - counts.distinct_prompt / whole, 4),
    }


def versions() -> dict[str, str]:
    names = ("blendjax", "jax", "jaxlib", "numpy", "tokenizers", "gguf")
    found = {name: _version(name) for name in names}
    return {"python": platform.python_version()} | found


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def fingerprint(path: Path, *parts: object) -> str:
    """Of all that decides the text: the input file, and what `parts` says."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update("|".join(map(str, parts)).encode())
    return digest.hexdigest()[:16]


def summary(report: Mapping[str, Any], *, output: Path, cut: int) -> Iterator[str]:
    """The report in a few lines; `cut` rows ended by length."""
    rows, tokens_, rate = report["rows"], report["tokens"], report["throughput"]
    schedule, seconds = report["schedule"], report["time_s"]
    yield (
        f"{rows['completed']} rows answered ({cut} cut off by length), {rows['failed']} failed "
        f"-> {output}"
    )
    if schedule["steps"]:
        yield (
            f"{tokens_['prompt']:,} prompt tokens ({tokens_['prompt_cached']:,} from shared "
            f"prefixes), {tokens_['generated']:,} generated; {rate['output_tok_s']:,.0f} output "
            f"tok/s, {rate['total_tok_s']:,.0f} in all"
        )
        yield (
            f"{schedule['steps']} steps, {schedule['padding_fraction']:.0%} padding, "
            f"{schedule['preemptions']} preemptions, {schedule['host_ms_per_step']:.2f} ms of host "
            f"time a step, {schedule['percent_of_bound']:.0f}% of the bound for "
            f"{report['hardware']}"
        )
    parts = ", ".join(f"{name} {seconds[name]:.1f}" for name in seconds if name != "total")
    yield f"{seconds['total']:.1f} s: {parts}"


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Raises `OutputFileError`."""
    text = json.dumps(report, indent=2, allow_nan=False) + "\n"
    with writing(path, "report"):
        path.write_text(text, encoding="utf-8")
