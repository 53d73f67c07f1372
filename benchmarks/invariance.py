"""The schedule must not change the text: one set of rows under many engine settings, compared.

    python benchmarks/invariance.py
    python benchmarks/invariance.py --rows 8 --max-tokens 16 --only mesh,pages

Rows: GSM8K 8-shot (shared prefix) and MT-bench turns, each once greedy and once with seeded
sampling under top_p, top_k or min_p. Every setting's tokens are compared with those of the base
setting (mesh 1x1, dfs, page 16, 512 tokens a step) up to the first token whose margin is under
1e-3. A line a setting: rows identical, rows that met a near tie before they differed, rows that
differ without one (must be 0), and preemptions. Exit status 1 if any row differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.workloads import gsm8k_8shot, mt_bench
from blendjax.config import EngineConfig, MeshSpec
from blendjax.core import Completion, PromptRow, Sampling
from blendjax.engine.llm import LLM
from blendjax.engine.mesh import reserve_cpu_devices

NEAR_TIE = 1e-3
_SAMPLED: tuple[dict[str, Any], ...] = (
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.05},
    {"top_p": 0.8, "top_k": 50},
)


def make_rows(count: int, max_tokens: int) -> list[PromptRow]:
    """Half GSM8K, half MT-bench, each prompt once greedy and once sampled."""
    sources = [*gsm8k_8shot(count // 4), *mt_bench(count // 4)]
    return [row for i, source in enumerate(sources) for row in _pair(i, source, max_tokens)]


def _pair(i: int, source: dict[str, Any], max_tokens: int) -> Iterator[PromptRow]:
    sampled: dict[str, Any] = {"temperature": 0.8, "seed": 1000 + i, **_SAMPLED[i % len(_SAMPLED)]}
    variants: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, sampled)
    for j, params in enumerate(variants):
        yield PromptRow(
            index=2 * i + j,
            line=2 * i + j + 1,
            custom_id=f"{source['custom_id']}-{j}",
            kind="chat" if "messages" in source else "completion",
            sampling=Sampling(max_tokens=max_tokens, **params),
            prompt=source.get("prompt"),
            messages=tuple(source["messages"]) if "messages" in source else None,
        )


def settings(longest: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and changes of every setting; `longest` row in tokens."""
    for mesh in ("1x2", "1x4", "1x8", "2x1", "2x4", "4x2"):
        yield f"mesh {mesh}", {"mesh": MeshSpec.parse(mesh)}
    yield "policy fcfs", {"policy": "fcfs"}
    yield "shuffled input", {"shuffle": True}
    yield "pages of 1", {"page_size": 1}
    yield "pages of 64", {"page_size": 64}
    yield "chunk 16", {"step_tokens": 16}
    yield "chunk 256", {"step_tokens": 256}
    yield "tight pool", {"num_pages": longest // 4 + 8, "page_size": 4}
    yield "no prefix sharing", {"prefix_sharing": False}
    yield (
        "tight pool, no sharing, chunk 100",
        {
            "num_pages": longest // 4 + 40,
            "page_size": 4,
            "prefix_sharing": False,
            "step_tokens": 100,
        },
    )


def run(rows: Sequence[PromptRow], *, shuffle: bool = False, **changes: Any) -> tuple[dict, Any]:
    config = EngineConfig(**{"mesh": MeshSpec(1, 1), "record_margins": True, **changes})
    rows = list(rows)
    if shuffle:
        random.Random(0).shuffle(rows)
    started = LLM(config=config).start(rows)
    answers = list(started)
    assert all(isinstance(a, Completion) for a in answers), answers
    return {a.request.custom_id: a for a in answers if isinstance(a, Completion)}, started


def compare(base: Completion, other: Completion) -> str:
    """`same`, `tie` (differs behind a near tie) or `differ`."""
    pairs = zip(base.token_ids, other.token_ids, base.margins, strict=False)
    for ours, theirs, margin in pairs:
        if ours != theirs:
            return "tie" if margin < NEAR_TIE else "differ"
        if margin < NEAR_TIE and base.token_ids != other.token_ids:
            return "tie"
    return "same" if base.token_ids == other.token_ids else "differ"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--only", default="", help="comma-separated starts of setting names")
    args = parser.parse_args()
    reserve_cpu_devices(MeshSpec(8, 1))
    rows = make_rows(args.rows, args.max_tokens)
    base, first = run(rows)
    met = sum(min(a.margins) < NEAR_TIE for a in base.values())
    longest = max(len(a.request.prompt_T) + args.max_tokens for a in base.values())
    print(f"{len(base)} rows, {met} of them meet a near tie somewhere; base {first.run_s:.0f} s")
    failed = 0
    only = tuple(name for name in args.only.split(",") if name)
    for name, changes in settings(longest):
        if only and not name.startswith(only):
            continue
        began = time.perf_counter()
        other, started = run(rows, **changes)
        verdicts = [compare(base[key], other[key]) for key in base]
        failed += verdicts.count("differ")
        print(
            f"{name:34s} same {verdicts.count('same'):3d}  near tie {verdicts.count('tie'):2d}  "
            f"differ {verdicts.count('differ'):2d}  preemptions {started.preemptions:3d}  "
            f"{time.perf_counter() - began:5.1f} s",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
