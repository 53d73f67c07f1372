"""Throughput of blendjax on a workload file, start-up apart from the run; the last line is JSON.

    python benchmarks/workloads.py --name mtbench --max-tokens 64 --ignore-eos --output mt.jsonl
    python benchmarks/throughput.py --input mt.jsonl --dtype float32
    python benchmarks/throughput.py --input mt.jsonl --dtype bfloat16 --mesh 1x2

`start_s` is from the process's start to the first launched step (imports, weights, compiles or
their cache); `run_s` from there to the last token. No compile cache unless --compile-cache is
given.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

BEGAN = time.perf_counter()
sys.path.insert(0, str(Path(__file__).parent.parent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--mesh", default="1x1")
    parser.add_argument("--policy", default="dfs")
    parser.add_argument("--max-seqs", type=int, default=128)
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--compile-cache", default="")
    parser.add_argument(
        "--repeat", type=int, default=1, help="runs in one process; all are printed"
    )
    args = parser.parse_args()

    from blendjax.config import EngineConfig, MeshSpec
    from blendjax.core import Sampling
    from blendjax.engine.compile_cache import use_compile_cache
    from blendjax.engine.llm import LLM
    from blendjax.io.rows import read_rows

    use_compile_cache(args.compile_cache)
    config = EngineConfig(
        mesh=MeshSpec.parse(args.mesh),
        policy=args.policy,
        dtype=args.dtype,
        max_seqs=args.max_seqs,
        step_tokens=args.step_tokens,
        page_size=args.page_size,
    )
    rows = list(read_rows(args.input, defaults=Sampling()))
    llm = LLM(args.model, config)
    for _ in range(args.repeat):
        run = llm.start(rows)
        run.warm()
        start_s = time.perf_counter() - BEGAN
        answers = list(run)
        prompt, output, cached, _ = (sum(c) for c in zip(*run.ended, strict=True))
        result = {
            "engine": "blendjax",
            "dtype": args.dtype,
            "mesh": args.mesh,
            "rows": len(answers),
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "output_tokens": output,
            "start_s": round(start_s, 2),
            "run_s": round(run.run_s, 2),
            "output_tok_s": round(output / run.run_s, 1),
            "total_tok_s": round((prompt + output) / run.run_s, 1),
            "steps": run.stats.steps,
            "padding": round(run.stats.padding_fraction, 3),
            "host_ms_per_step": round(1e3 * run.stats.host_s / run.stats.steps, 3),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
