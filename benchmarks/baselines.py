r"""Throughput of other engines on a workload file, for the table next to ours.

The transformers and vLLM baselines need a Hugging Face directory, which `--export` writes from the
GGUF file once for each dtype (with torch and transformers). A measurement runs in a process of its
own, under the interpreter that `--python` names, so that each engine keeps its own environment:

    python benchmarks/baselines.py --export export-bf16 --gguf FILE.gguf --dtype bfloat16
    python benchmarks/baselines.py --engine vllm --python VENV/bin/python --model export-bf16 \
        --dtype bfloat16 --input mtbench.jsonl

The input is a file of benchmarks/workloads.py. Every row generates exactly its `max_tokens`
(`--max-tokens` for all), greedily, EOS ignored. Prompts are turned into token ids before any clock
of a run starts. "start-up" is from the launch of the process to the end of a tiny warm-up request
(imports, loading, compiling); "run" is the workload alone. The last line is the result as JSON.
"""

# pyright: reportMissingImports=false
# (torch, transformers and vllm are not dependencies of the product)

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workloads import demo_gguf, load_tokenizer, read_rows, to_token_ids

WARMUP_IDS = [1, 9690, 198]  # shares no page with a workload, so it fills no prefix cache
VLLM_ENVIRONMENT = {  # set before the process starts, unless the caller has set them
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}

# An engine is a function of (prompts as token ids, the length of each answer); it returns how many
# tokens it generated. Building it is start-up, calling it is the run.
Engine = Callable[[list[list[int]], list[int]], int]


def export(gguf_path: Path, directory: Path, dtype: str) -> None:
    """Write the GGUF model as safetensors in `dtype`, with its config and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(gguf_path.parent), gguf_file=gguf_path.name, dtype=torch.float32
    ).to(getattr(torch, dtype))
    with contextlib.suppress(AttributeError):  # the weights are no longer quantised
        del model.config.quantization_config
    model.hf_quantizer = None
    model.config.dtype = getattr(torch, dtype)
    model.save_pretrained(str(directory))
    load_tokenizer(gguf_path).save_pretrained(str(directory))
    print(f"wrote {directory} ({dtype})")


def transformers_engine(options: argparse.Namespace) -> Engine:
    """`generate` in batches of the file's order, left-padded to the longest row of the batch."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype)
    )
    pad = model.generation_config.pad_token_id or 0
    model.generation_config.eos_token_id = None

    def run(prompts: list[list[int]], lengths: list[int]) -> int:
        generated = 0
        for start in range(0, len(prompts), options.batch_size):
            batch = prompts[start : start + options.batch_size]
            new = max(lengths[start : start + options.batch_size])
            longest = max(map(len, batch))
            padded = [[pad] * (longest - len(ids)) + ids for ids in batch]
            mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in batch]
            out = model.generate(
                input_ids=torch.tensor(padded),
                attention_mask=torch.tensor(mask),
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=pad,
            )
            if out.shape[1] != longest + new:
                raise RuntimeError(f"asked for {new} tokens, got {out.shape[1] - longest}")
            generated += sum(lengths[start : start + options.batch_size])
        return generated

    return run


def vllm_engine(options: argparse.Namespace) -> Engine:
    """vLLM's offline `LLM.generate` with prefix caching: it batches and orders by itself."""
    from vllm import LLM, SamplingParams

    model: Any = LLM(
        model=options.model,
        dtype=options.dtype,
        enable_prefix_caching=True,
        max_num_seqs=options.max_seqs,
    )

    def run(prompts: list[list[int]], lengths: list[int]) -> int:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = model.generate(inputs, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Build the engine, warm it up, run the workload once."""
    build = {"transformers": transformers_engine, "vllm": vllm_engine}[options.engine]
    engine = build(options)
    engine([WARMUP_IDS], [4])
    startup_s = time.time() - options.launched
    rows = to_token_ids(read_rows(options.input)[: options.rows], load_tokenizer(options.model))
    prompts = [row["prompt_token_ids"] for row in rows]
    lengths = [options.max_tokens or row["max_tokens"] for row in rows]
    before = time.perf_counter()
    generated = engine(prompts, lengths)
    run_s = time.perf_counter() - before
    prompt_tokens = sum(map(len, prompts))
    return {
        "engine": options.engine,
        "version": importlib.metadata.version(
            "vllm-cpu" if options.engine == "vllm" else "transformers"
        ),
        "dtype": options.dtype,
        "preload": [
            Path(name).name for name in os.environ.get("LD_PRELOAD", "").split(":") if name
        ],
        "workload": options.input.name,
        "rows": len(rows),
        "prompt_tokens": prompt_tokens,
        "output_tokens": generated,
        "startup_s": round(startup_s, 2),
        "run_s": round(run_s, 2),
        "output_tok_s": round(generated / run_s, 1),
        "total_tok_s": round((generated + prompt_tokens) / run_s, 1),
    }


def run_child(options: argparse.Namespace) -> int:
    """Start this script under the engine's interpreter, in the environment that suits it best."""
    environment = {"HF_HUB_OFFLINE": "1", **os.environ}
    openmp = Path(options.python).parent.parent / "lib" / "libiomp5.so"
    if options.engine == "vllm":
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))  # its own choice spares one
        environment = {**VLLM_ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": cores, **environment}
        if options.iomp and openmp.exists():  # comes with vllm-cpu, which by itself uses libgomp
            preload = [environment.get("LD_PRELOAD", ""), str(openmp.absolute())]
            environment["LD_PRELOAD"] = ":".join(filter(None, preload))
    command = [options.python, *sys.argv, "--launched", repr(time.time())]
    return subprocess.run(command, env=environment, check=False).returncode


def show(result: dict[str, Any]) -> None:
    """The table for people, then one JSON line for scripts."""
    for name, value in result.items():
        print(f"{name:14} {value}")
    print(json.dumps(result), flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--export", type=Path, metavar="DIR", help="write the model here and end")
    parser.add_argument("--gguf", type=Path, help="for --export; default: the demo model")
    parser.add_argument("--engine", choices=("transformers", "vllm"))
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the engine")
    parser.add_argument("--model", help="a Hugging Face directory, see --export")
    parser.add_argument("--input", type=Path, help="workload file")
    parser.add_argument("--rows", type=int, help="only the first so many rows")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--max-tokens", type=int, help="instead of the rows' own max_tokens")
    parser.add_argument("--batch-size", type=int, default=16, help="transformers only")
    parser.add_argument("--max-seqs", type=int, default=64, help="vllm only")
    parser.add_argument("--iomp", action="store_true", help="vllm only: preload Intel's OpenMP")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="transformers only")
    parser.add_argument("--launched", type=float, help=argparse.SUPPRESS)  # set in the child
    options = parser.parse_args()
    if options.export is None and not (options.engine and options.model and options.input):
        parser.error("give --export DIR, or all of --engine, --model and --input")
    return options


def main() -> int:
    options = parse_options()
    if options.export is not None:
        export(options.gguf or demo_gguf(), options.export, options.dtype)
        return 0
    if options.launched is None:
        return run_child(options)
    show(measure(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
