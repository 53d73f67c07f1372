"""The forward pass of one step: scan over stacked layers, the KV pool in the carry.

Runs inside `shard_map`: arrays are local, collectives over the axis "model" are written out.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from blendjax.config import HeadLayout, ModelConfig
from blendjax.kernels import reference as ops
from blendjax.model import layers
from blendjax.packing import TILE

Params = dict[str, Any]  # the tree that model.placement.place makes


def forward(
    params: Params,
    pool: ops.KVPool,
    batch: dict[str, Array],
    *,
    token_N: Array,
    model: ModelConfig,
    layout: HeadLayout,
    decode_rows: int,
) -> tuple[ops.KVPool, Array]:
    """Gives the pool with this step's K and V in it, and the normed hidden state `[N, D]`."""
    pages = pool.k_MKSE.shape[0] // model.num_layers
    first_id = lax.axis_index("model") * layout.vocab
    x_ND = lax.psum(layers.embed(token_N, params["embed"], first_id=first_id), "model")
    turn = layers.rope_angles(batch["pos"], params["inv_freq"])
    page_BP = ops.pad_table(batch["page"], pool.page_size)

    def block(carry: tuple[Array, ops.KVPool], layer: tuple[Params, Array]):
        x_ND, pool = carry
        weights, index = layer
        h_ND = layers.rms_norm(x_ND, weights["attn_norm"], eps=model.rms_eps)
        q_NHE, k_NKE, v_NKE = _project(h_ND, weights["qkv"], turn, model, layout)
        first_page = index * pages
        pool = ops.write_kv(pool, k_NKE, v_NKE, batch["kv_slot"] + first_page * pool.page_size)
        copy_C3 = batch["copy"] + first_page * jnp.array([1, 1, 0], jnp.int32)
        pool = ops.copy_pages(pool, copy_C3, batch["counts"][2])
        out_NHE = _attend(q_NHE, pool, batch, page_BP + first_page, decode_rows)
        out_ND = layers.dense(out_NHE.reshape(len(out_NHE), -1), weights["out"])
        x_ND = x_ND + lax.psum(out_ND, "model")
        h_ND = layers.rms_norm(x_ND, weights["ffn_norm"], eps=model.rms_eps)
        ffn_ND = layers.swiglu(h_ND, weights["gate_up"], weights["down"])
        return (x_ND + lax.psum(ffn_ND, "model"), pool), None

    index_L = jnp.arange(model.num_layers, dtype=jnp.int32)
    (x_ND, pool), _ = lax.scan(block, (x_ND, pool), (params["layers"], index_L))
    return pool, layers.rms_norm(x_ND, params["norm"], eps=model.rms_eps)


def _project(
    h_ND: Array,
    qkv: Array,
    turn: tuple[Array, Array],
    model: ModelConfig,
    layout: HeadLayout,
) -> tuple[Array, Array, Array]:
    """Queries and keys rotated, values, as `[N, heads, E]`."""
    all_NHE = layers.dense(h_ND, qkv).reshape(len(h_ND), -1, model.head_dim)
    q_NHE, k_NKE, v_NKE = jnp.split(all_NHE, [layout.heads, layout.heads + layout.kv_heads], axis=1)
    return layers.rope(q_NHE, *turn), layers.rope(k_NKE, *turn), v_NKE


def _attend(
    q_NHE: Array, pool: ops.KVPool, batch: dict[str, Array], page_BP: Array, decode_rows: int
) -> Array:
    """Decode attention on the leading rows, prefill attention on the chunks behind them."""
    rows = decode_rows
    decoded = ops.decode_attention(q_NHE[:rows], pool, page_BP[:rows], batch["kv_len"][:rows])
    spare = ((0, TILE), (0, 0), (0, 0))
    out_NHE = jnp.pad(decoded, ((0, len(q_NHE) + TILE - rows), (0, 0), (0, 0)))
    out_NHE = ops.prefill_attention(
        jnp.pad(q_NHE, spare),
        out_NHE,
        pool,
        page_BP,
        batch["tile"],
        batch["counts"][1],
        tile_rows=TILE,
    )
    return out_NHE[: len(q_NHE)]
