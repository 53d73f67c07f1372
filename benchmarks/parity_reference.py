"""The greedy tokens of Hugging Face transformers, against which ours are compared.

Runs the GGUF model in float32 on the CPU with eager attention, one prompt at a time with a KV
cache: no batch, no padding, no shared prefix. Before it starts it checks every weight against
the gguf package's own dequantisation, and the rotary frequencies against the file's base.

    python benchmarks/workloads.py --name gsm8k --rows 50 --token-ids --output gsm8k.ids.jsonl
    python benchmarks/parity_reference.py --input gsm8k.ids.jsonl --output gsm8k.reference.jsonl

The input is JSONL with "custom_id", "prompt_token_ids" and "max_tokens", so that tokenizers are
not compared here. Each output line has "custom_id", "token_ids" (the EOS that ended the row
included) and "gaps": the difference between the two highest logits of each step. A step whose gap
is tiny is a near tie, where another order of additions may choose the other token:
benchmarks/compare_tokens.py knows that. Needs torch, transformers, accelerate and gguf.
"""

# pyright: reportMissingImports=false
# (torch, transformers and vllm are not dependencies of the product)

from __future__ import annotations

import argparse
import inspect
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workloads import Row, demo_gguf, read_rows, write_rows

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def load_model(gguf_path: Path, threads: int) -> Any:
    """The float32 model on the CPU, checked tensor by tensor."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf_path.parent),
        gguf_file=gguf_path.name,
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()
    reader = gguf.GGUFReader(gguf_path)
    check_weights(model, reader)
    check_rope(model, reader)
    return model


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def halves(weight_HD: np.ndarray, heads: int) -> np.ndarray:
    """Reorder a rotated projection: GGUF pairs neighbours, transformers rows half a head apart."""
    rows, columns = weight_HD.shape
    paired = weight_HD.reshape(heads, rows // heads // 2, 2, columns)
    return paired.swapaxes(1, 2).reshape(rows, columns)


def check_weights(model: Any, reader: Any) -> None:
    """Raise unless the parameters are the file's tensors, dequantised to float32, bit for bit."""
    import gguf

    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    parameters = dict(model.named_parameters())
    for tensor in reader.tensors:
        want = gguf.dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            want = halves(want, heads[part])
        name = hugging_face_name(tensor.name)
        got = parameters.pop(name).detach().numpy()
        if got.dtype != np.float32 or not np.array_equal(got, want):
            raise ValueError(f"{name} ({got.dtype}) is not {tensor.name} in float32")
    if parameters:
        raise ValueError(f"parameters that the file does not have: {sorted(parameters)}")


def check_rope(model: Any, reader: Any) -> None:
    """Raise unless the rotary frequencies follow from the file's base and head size."""

    def field(name: str) -> float:
        return float(reader.fields[f"llama.rope.{name}"].contents())

    size = field("dimension_count")
    want = field("freq_base") ** (-np.arange(0, size, 2) / size)
    got = model.model.rotary_emb.inv_freq.numpy()
    if not np.allclose(got, want, rtol=1e-6, atol=0):
        raise ValueError(f"rotary frequencies {got[:3]}..., the file says {want[:3]}...")


def greedy(model: Any, prompt: list[int], *, max_tokens: int, eos_ids: set[int]) -> Row:
    """Tokens and top-2 gaps, one forward pass over the prompt and then one for each token."""
    import torch
    from transformers import DynamicCache

    token_ids: list[int] = []
    gaps: list[float] = []
    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    state = {name: DynamicCache(), "use_cache": True, "logits_to_keep": 1}  # updated in place
    step = torch.tensor([prompt])
    with torch.inference_mode():
        while True:
            logits_V = model(input_ids=step, **state).logits[0, -1]
            best = torch.topk(logits_V, 2).values
            token_ids.append(int(torch.argmax(logits_V)))  # a tie: the lowest id, as ours
            gaps.append(float(best[0] - best[1]))
            if token_ids[-1] in eos_ids or len(token_ids) == max_tokens:
                return {"token_ids": token_ids, "gaps": gaps}
            step = torch.tensor([[token_ids[-1]]])


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, help="default: the demo model")
    parser.add_argument("--rows", type=int, help="only the first so many rows")
    parser.add_argument("--max-tokens", type=int, help="instead of the rows' own max_tokens")
    parser.add_argument(
        "--eos-ids", type=int, nargs="*", default=[2], help="none given: run to max_tokens"
    )
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    os.environ["HF_HUB_OFFLINE"] = "1"
    rows = read_rows(options.input)[: options.rows]
    model = load_model(options.gguf or demo_gguf(), options.threads)
    print("weights are the file's in float32, rotary frequencies agree", file=sys.stderr)
    started = time.perf_counter()
    results = []
    for done, row in enumerate(rows, start=1):
        answer = greedy(
            model,
            row["prompt_token_ids"],
            max_tokens=options.max_tokens or row["max_tokens"],
            eos_ids=set(options.eos_ids),
        )
        results.append({"custom_id": row["custom_id"], **answer})
        print(f"{done}/{len(rows)} rows, {time.perf_counter() - started:.0f} s", file=sys.stderr)
    write_rows(options.output, results)


if __name__ == "__main__":
    main()
