"""Compare the tokens of two runs, row by row, up to the first near tie.

    python benchmarks/compare_tokens.py gsm8k.reference.jsonl gsm8k.outputs.jsonl
    python benchmarks/compare_tokens.py mesh1x1.jsonl mesh2x4.jsonl --gap 1e-3

Each file is JSONL with "custom_id" and "token_ids": the output of benchmarks/parity_reference.py
or of `offline_infer.py --output-format simple`. Where a row has "gaps" (the difference between the
two highest logits of each step; of either file, the smaller one counts), tokens are compared up to
the first step whose gap is under `--gap`: there the runs may rightly part. Rows are counted as
identical (all tokens), parted at or after a near tie, or different. Order of rows does not matter.
Exit status 1 if a row is different or is missing in one file. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read(path: Path) -> dict[tuple[str, int], Row]:
    """Rows by custom_id and sample (`index`, 0 where the file has none)."""
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    table = {(row["custom_id"], row.get("index") or 0): row for row in rows}
    if len(table) != len(rows):
        raise ValueError(f"{path} has {len(rows) - len(table)} repeated custom_id")
    return table


def first_difference(a: Row, b: Row) -> int | None:
    """The first step at which the tokens differ, or None. A shorter row differs where it ends."""
    pairs = itertools.zip_longest(a["token_ids"] or (), b["token_ids"] or ())
    return next((step for step, (x, y) in enumerate(pairs) if x != y), None)


def first_near_tie(a: Row, b: Row, gap: float) -> int | None:
    """The first step whose smaller recorded gap is under `gap`, or None."""
    steps = itertools.zip_longest(a.get("gaps") or (), b.get("gaps") or (), fillvalue=float("inf"))
    return next((step for step, both in enumerate(steps) if min(both) < gap), None)


def verdict(a: Row, b: Row, gap: float) -> tuple[str, int | None]:
    """One of identical, near_tie, different, and the step at which the rows part."""
    step = first_difference(a, b)
    if step is None:
        return "identical", None
    tie = first_near_tie(a, b, gap)
    return ("near_tie" if tie is not None and tie <= step else "different"), step


def compare(a: dict, b: dict, gap: float) -> dict[str, Any]:
    """Counts of the verdicts; each row that is not identical is printed."""
    missing = sorted(a.keys() ^ b.keys())
    counts = {"identical": 0, "near_tie": 0, "different": 0, "missing": len(missing)}
    for custom_id, index in missing:
        print(f"missing    {custom_id} sample {index}")
    met = 0
    for key in sorted(a.keys() & b.keys()):
        met += first_near_tie(a[key], b[key], gap) is not None
        kind, step = verdict(a[key], b[key], gap)
        counts[kind] += 1
        if step is not None:
            print(f"{kind:10} {key[0]} sample {key[1]}: tokens part at step {step}")
    return {"rows": len(a.keys() | b.keys()), **counts, "rows_with_near_tie": met}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", type=Path, metavar="A")
    parser.add_argument("b", type=Path, metavar="B")
    parser.add_argument("--gap", type=float, default=1e-3)
    options = parser.parse_args()
    result = compare(read(options.a), read(options.b), options.gap)
    print(f"rows identical to the end                  {result['identical']}")
    print(f"rows that parted at or after a near tie    {result['near_tie']}")
    print(f"rows that differ without one               {result['different']}")
    print(f"rows missing in one file                   {result['missing']}")
    print(f"rows that met a near tie (parted or not)   {result['rows_with_near_tie']}")
    print(json.dumps(result))
    return 1 if result["different"] or result["missing"] else 0


if __name__ == "__main__":
    sys.exit(main())
