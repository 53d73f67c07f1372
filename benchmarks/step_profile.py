"""Where a decode step's time goes on this machine: the whole step beside its parts run alone.

    python benchmarks/step_profile.py
    python benchmarks/step_profile.py --dtype bfloat16 --rows 80 --context 150

Random weights in the demo model's shape, mesh 1x1. Parts: the layers' matrix products (SwiGLU
included), decode attention of all layers, head and greedy draw. Best of several repeats, wall
milliseconds and CPU milliseconds per core; the last line is JSON. Run it alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

sys.path.insert(0, str(Path(__file__).parent.parent))

from blendjax.config import HeadLayout, MeshSpec, ModelConfig
from blendjax.engine.mesh import make_mesh
from blendjax.kernels import reference as ops
from blendjax.model import layers, sampler
from blendjax.model.placement import param_shapes
from blendjax.model.step import DeviceState, PoolSizes, make_step
from blendjax.packing import Bucket, pack_into, packed_size

PAGE = 16
MODEL = ModelConfig(
    name="SmolLM2-135M",
    num_layers=30,
    hidden=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    ffn=1536,
    vocab=49152,
    max_len=8192,
    rope_theta=1e5,
    rms_eps=1e-5,
    tied=True,
)


def measure(call: Callable[[], Any], repeats: int = 8) -> tuple[float, float]:
    """Best wall and CPU-per-core milliseconds of a call."""
    jax.block_until_ready(call())
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(call())
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return 1e3 * min(walls), 1e3 * min(cpus) / (os.cpu_count() or 1)


def make_params(dtype: Any, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    draw = lambda s: (rng.standard_normal(s.shape, np.float32) * 0.02).astype(s.dtype)
    shapes = param_shapes(MODEL, HeadLayout.of(MODEL, 1), mesh, dtype=dtype)
    return jax.tree.map(lambda s: jax.device_put(draw(s), s.sharding), shapes)


def full_step(params: dict[str, Any], mesh: jax.sharding.Mesh, rows: int, context: int, dtype: Any):
    """A call that runs one decode step of `rows` rows."""
    layout, per_row = HeadLayout.of(MODEL, 1), -(-context // PAGE)
    sizes = PoolSizes(pages=rows * per_row + 1, page_size=PAGE, slots=rows, dtype=dtype)
    bucket = Bucket(rows, rows, per_row)
    packed = np.zeros((1, packed_size(bucket)), np.int32)
    view = pack_into(packed[0], bucket)
    view["counts"][0] = rows
    view["page"][:] = 1 + np.arange(rows * per_row).reshape(rows, per_row)
    view["pos"][:] = context - 1
    view["kv_slot"][:] = view["page"][:, -1] * PAGE + (context - 1) % PAGE
    view["kv_len"][:] = context
    view["slot"][:] = view["last_row"][:] = np.arange(rows)
    shapes = DeviceState.shapes(MODEL, layout, mesh, sizes=sizes)
    state = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    step = make_step(MODEL, layout, mesh, bucket, margins=False)

    def call() -> jax.Array:
        nonlocal state
        state, drawn = step(params, state, packed)
        return drawn

    return call, view["page"].copy()


def matmuls(x_ND: jax.Array, stacked: dict[str, jax.Array]) -> jax.Array:
    def block(x_ND: jax.Array, w: dict[str, jax.Array]):
        heads = layers.dense(x_ND, w["qkv"])[:, : MODEL.num_heads * MODEL.head_dim]
        x_ND = x_ND + layers.dense(heads, w["out"])
        return x_ND + layers.swiglu(x_ND, w["gate_up"], w["down"]), None

    return lax.scan(block, x_ND, stacked)[0]


def attention(q_BHE: jax.Array, pool: ops.KVPool, page_BP: jax.Array, len_B: jax.Array):
    table, pages = ops.pad_table(page_BP, PAGE), pool.k_MKSE.shape[0] // MODEL.num_layers
    one = lambda q, i: (q + ops.decode_attention(q, pool, table + i * pages, len_B), None)
    return lax.scan(one, q_BHE, jnp.arange(MODEL.num_layers))[0]


def head(x_BD: jax.Array, embed_VD: jax.Array):
    return sampler._first_best(layers.unembed(x_BD, embed_VD))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=80)
    parser.add_argument("--context", type=int, default=150)
    args = parser.parse_args()
    dtype, rows = jnp.dtype(args.dtype), args.rows
    mesh = make_mesh(MeshSpec(1, 1)).mesh
    params = make_params(dtype, mesh)
    step, page_BP = full_step(params, mesh, rows, args.context, dtype)
    local = jax.tree.map(lambda a: a[0], params)
    x_ND = jnp.ones((rows, MODEL.hidden), dtype)
    q_BHE = jnp.ones((rows, MODEL.num_heads, MODEL.head_dim), dtype)
    kv = jnp.ones((MODEL.num_layers * (page_BP.max() + 1), 3, PAGE, MODEL.head_dim), dtype)
    len_B = jnp.full(rows, args.context, jnp.int32)
    run_matmuls, run_attention, run_head = map(jax.jit, (matmuls, attention, head))
    parts = {
        "step": step,
        "matmuls": lambda: run_matmuls(x_ND, local["layers"]),
        "attention": lambda: run_attention(q_BHE, ops.KVPool(kv, kv), jnp.asarray(page_BP), len_B),
        "head": lambda: run_head(x_ND, local["embed"]),
    }
    result: dict[str, Any] = {"jax": jax.__version__, **vars(args)}
    for name, call in parts.items():
        wall, cpu = measure(call)
        result[f"{name}_ms"], result[f"{name}_cpu_ms"] = round(wall, 1), round(cpu, 1)
        print(f"{name:10s} {wall:7.1f} ms wall  {cpu:7.1f} ms of each core", flush=True)
    flops = 2 * rows * MODEL.layer_params
    result["matmul_gflops"] = round(flops / result["matmuls_ms"] / 1e6, 1)
    print(f"the layers' matrix products run at {result['matmul_gflops']} GFLOP/s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
