"""What this machine's CPU can do, as XLA drives it: the rates that a step is held against.

    python benchmarks/roofline.py
    python benchmarks/roofline.py --rows 64,128

Prints GEMM rates at the shapes of a step of the demo model (float32, and bfloat16 with float32
sums) and the rate of a streamed read; the last line is JSON. Best of several repeats: run it alone.
"""

from __future__ import annotations

import argparse
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def best_s(call, repeats: int = 15) -> float:
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return min(times)


def gemm_gflops(rows: int, k: int, n: int, dtype) -> float:
    """Rate of one [rows, k] x [k, n] product with float32 sums."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, k), dtype=np.float32)).astype(dtype)
    w = jnp.asarray(rng.standard_normal((k, n), dtype=np.float32)).astype(dtype)
    dims = (((1,), (0,)), ((), ()))
    product = jax.jit(lambda x, w: lax.dot_general(x, w, dims, preferred_element_type=jnp.float32))
    return 2 * rows * k * n / best_s(lambda: product(x, w)) / 1e9


def read_gb_s() -> float:
    """Rate at which a 512 MB array is summed."""
    x = jnp.ones(128 << 20, jnp.float32)
    total = jax.jit(lambda x: x.reshape(-1, 1024).max(-1))
    return x.nbytes / best_s(lambda: total(x), 7) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="16,80,256", help="token rows of a step")
    args = parser.parse_args()
    result: dict[str, float | str] = {"jax": jax.__version__}
    for dtype in (jnp.float32, jnp.bfloat16):
        for rows in map(int, args.rows.split(",")):
            for k, n in ((576, 960), (576, 3072), (1536, 576)):
                rate = gemm_gflops(rows, k, n, dtype)
                name = f"{jnp.dtype(dtype).name} {rows}x{k}x{n}"
                result[name] = round(rate, 1)
                print(f"{name:28s} {rate:7.1f} GFLOP/s", flush=True)
    result["read_gb_s"] = round(read_gb_s(), 1)
    print(f"{'streamed read':28s} {result['read_gb_s']:7.1f} GB/s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
