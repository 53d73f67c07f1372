"""The run's report (design section 7): one JSON object of counts, seconds and ratios."""

from __future__ import annotations

import dataclasses
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunCounts:
    """What a run did, summed over rows and steps."""

    rows: int
    completed: int
    failed: int
    prompt: int
    prompt_cached: int
    recomputed: int
    generated: int
    distinct_prompt: int  # tokens of the prefix tree: the least that must be computed


def throughput(counts: RunCounts, run_s: float) -> dict[str, float]:
    """Tokens a second of the run proper; `total` counts prompt tokens found in the cache too."""
    rate = lambda tokens: round(tokens / run_s, 2) if run_s > 0 else 0.0
    return {
        "total_tok_s": rate(counts.prompt + counts.generated),
        "output_tok_s": rate(counts.generated),
    }


def tokens(counts: RunCounts) -> dict[str, int]:
    return {
        "prompt": counts.prompt,
        "prompt_cached": counts.prompt_cached,
        "prompt_computed": counts.prompt - counts.prompt_cached,
        "recomputed": counts.recomputed,
        "generated": counts.generated,
    }


def sharing(counts: RunCounts) -> dict[str, float]:
    """Shares of all prompt tokens that were, and that could have been, taken from shared prefixes."""
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


def write_report(path: Path, report: dict[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
