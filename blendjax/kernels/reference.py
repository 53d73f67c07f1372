"""The definition of every op, in plain jnp; also the path on a CPU, so written to be fast there.

Scores and sums are float32 whatever the pool holds. A position that must not be read is *selected*
away, never added to or multiplied by zero: pages nobody wrote may hold NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

BLOCK_TOKENS = 64  # KV tokens of one online-softmax block: 16-page gathers cost more than they save
DECODE_GROUP = 16  # decode rows that share a trip count: the longest context among them
_MASKED = -1e30


class KVPool(NamedTuple):
    """K and V of all layers in one flat pool of pages; page 0 of every layer is scratch."""

    k_MKSE: Array
    v_MKSE: Array

    @property
    def page_size(self) -> int:
        return self.k_MKSE.shape[2]


class Softmax(NamedTuple):
    """Running softmax over key blocks: acc / total is exact after the last one."""

    top: Array
    total: Array
    acc: Array

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> Softmax:
        """For queries of `shape = (..., E)`."""
        zero = jnp.zeros(shape[:-1], jnp.float32)
        return cls(zero + _MASKED, zero, jnp.zeros(shape, jnp.float32))

    def weigh(self, score: Array, valid: Array) -> tuple[Softmax, Array]:
        """Rescale to the new maximum: the state without the block's values, and its weights."""
        top = jnp.maximum(self.top, jnp.where(valid, score, _MASKED).max(-1))
        weight = jnp.where(valid, jnp.exp(score - top[..., None]), 0.0)
        keep = jnp.exp(self.top - top)
        total = self.total * keep + weight.sum(-1)
        return Softmax(top, total, self.acc * keep[..., None]), weight

    def result(self) -> Array:
        """Zero for a query that saw nothing."""
        return self.acc / jnp.maximum(self.total, 1e-30)[..., None]


def write_kv(pool: KVPool, k_NKE: Array, v_NKE: Array, slot_N: Array) -> KVPool:
    """Put row n's K and V at slot `slot_N[n] = page * S + offset`. Only scratch may repeat."""
    page_N, offset_N = slot_N // pool.page_size, slot_N % pool.page_size
    put = lambda pool_MKSE, new_NKE: pool_MKSE.at[page_N, :, offset_N].set(
        new_NKE.astype(pool_MKSE.dtype), mode="drop"
    )
    return KVPool(put(pool.k_MKSE, k_NKE), put(pool.v_MKSE, v_NKE))


def copy_pages(pool: KVPool, copy_C3: Array, num_copies: Array) -> KVPool:
    """Copy the first tokens of page to page: rows of `copy_C3` are (source, target, tokens).

    In order, one after another: a source may be the target of an earlier copy of the same step.
    """
    offset_S = jnp.arange(pool.page_size)[None, :, None]

    def one(i: Array, pool: KVPool) -> KVPool:
        source, target, tokens = copy_C3[i]

        def put(pool_MKSE: Array) -> Array:
            page = lambda m: lax.dynamic_index_in_dim(pool_MKSE, m, keepdims=False)
            merged_KSE = jnp.where(offset_S < tokens, page(source), page(target))
            return lax.dynamic_update_index_in_dim(pool_MKSE, merged_KSE, target, 0)

        return KVPool(put(pool.k_MKSE), put(pool.v_MKSE))

    return lax.fori_loop(0, num_copies, one, pool)


def pad_table(page_BP: Array, page_size: int) -> Array:
    """Widen the page table to whole KV blocks; the new entries name scratch and are masked."""
    step = block_pages(page_size)
    return jnp.pad(page_BP, ((0, 0), (0, -page_BP.shape[1] % step)))


def block_pages(page_size: int) -> int:
    return max(1, BLOCK_TOKENS // page_size)


def _load_block(pool_MKSE: Array, page: Array, valid_T: Array | None = None) -> Array:
    """Pages `[..., P]` as keys or values `[..., K, T, E]`, zero where `valid_T` says no."""
    block = jnp.moveaxis(pool_MKSE[page], -3, -4)  # [..., K, P, S, E]
    block = block.reshape(*block.shape[:-3], -1, block.shape[-1])
    if valid_T is None:
        return block
    return jnp.where(valid_T[..., None, :, None], block, jnp.zeros((), block.dtype))


def decode_attention(q_BHE: Array, pool: KVPool, page_BP: Array, kv_len_B: Array) -> Array:
    """One query row a sequence over its first `kv_len_B` tokens; zeros for length 0. [B, H, E].

    `page_BP` already points into the layer and is whole blocks wide (`pad_table`). Sequences of
    similar context should be neighbours: each group of rows runs to its own longest context.
    """
    b = q_BHE.shape[0]
    group = DECODE_GROUP if b % DECODE_GROUP == 0 else b
    split = lambda a: a.reshape(b // group, group, *a.shape[1:])
    run = lambda rows: _decode_group(rows[0], pool, rows[1], rows[2])
    return lax.map(run, (split(q_BHE), split(page_BP), split(kv_len_B))).reshape(q_BHE.shape)


def _decode_group(q_BHE: Array, pool: KVPool, page_BP: Array, kv_len_B: Array) -> Array:
    b, h, e = q_BHE.shape
    k = pool.k_MKSE.shape[1]
    q_BKGE = (q_BHE * e**-0.5).reshape(b, k, h // k, e)
    pages = block_pages(pool.page_size)
    tokens = pages * pool.page_size

    def body(i: Array, soft: Softmax) -> Softmax:
        block_BP = lax.dynamic_slice_in_dim(page_BP, i * pages, pages, axis=1)
        valid_BT = i * tokens + jnp.arange(tokens) < kv_len_B[:, None]
        k_BKTE = _load_block(pool.k_MKSE, block_BP)
        v_BKTE = _load_block(pool.v_MKSE, block_BP, valid_BT)
        score = jnp.einsum("bkge,bkte->bkgt", q_BKGE, k_BKTE, preferred_element_type=jnp.float32)
        soft, weight = soft.weigh(score, valid_BT[:, None, None, :])
        seen = jnp.einsum(
            "bkgt,bkte->bkge",
            weight.astype(v_BKTE.dtype),
            v_BKTE,
            preferred_element_type=jnp.float32,
        )
        return soft._replace(acc=soft.acc + seen)

    blocks = (jnp.max(kv_len_B) + tokens - 1) // tokens
    soft = lax.fori_loop(0, blocks, body, Softmax.empty((b, k, h // k, e)))
    return soft.result().reshape(q_BHE.shape).astype(q_BHE.dtype)


def prefill_attention(
    q_NHE: Array,
    out_NHE: Array,
    pool: KVPool,
    page_BP: Array,
    tile_I4: Array,
    num_tiles: Array,
    *,
    tile_rows: int,
) -> Array:
    """Causal attention of ragged prefill chunks, written into `out_NHE` where a tile has rows.

    A tile is (first token row, rows <= tile_rows, sequence, position of the first row) and never
    spans two sequences. Tiles rise and touch, and `q`, `out` have `tile_rows` spare rows at the
    end, so what a short tile writes past its rows is overwritten by the next one.
    """
    h, e = q_NHE.shape[1:]
    k = pool.k_MKSE.shape[1]
    pages = block_pages(pool.page_size)
    tokens = pages * pool.page_size

    def tile(i: Array, out_NHE: Array) -> Array:
        start, rows, seq, pos = tile_I4[i]
        q_QHE = lax.dynamic_slice_in_dim(q_NHE, start, tile_rows) * e**-0.5
        q_KGQE = jnp.moveaxis(q_QHE.reshape(tile_rows, k, h // k, e), 0, 2)
        page_P = lax.dynamic_index_in_dim(page_BP, seq, keepdims=False)
        row_Q = jnp.arange(tile_rows)

        def body(j: Array, soft: Softmax) -> Softmax:
            block_P = lax.dynamic_slice_in_dim(page_P, j * pages, pages)
            at_T = j * tokens + jnp.arange(tokens)
            valid_QT = (at_T <= (pos + row_Q)[:, None]) & (row_Q < rows)[:, None]
            k_KTE = _load_block(pool.k_MKSE, block_P)
            v_KTE = _load_block(pool.v_MKSE, block_P, at_T < pos + rows)
            score = jnp.einsum("kgqe,kte->kgqt", q_KGQE, k_KTE, preferred_element_type=jnp.float32)
            soft, weight = soft.weigh(score, valid_QT[None, None])
            seen = jnp.einsum(
                "kgqt,kte->kgqe",
                weight.astype(v_KTE.dtype),
                v_KTE,
                preferred_element_type=jnp.float32,
            )
            return soft._replace(acc=soft.acc + seen)

        blocks = (pos + rows + tokens - 1) // tokens
        soft = lax.fori_loop(0, blocks, body, Softmax.empty(q_KGQE.shape))
        out_QHE = jnp.moveaxis(soft.result(), 2, 0).reshape(tile_rows, h, e)
        return lax.dynamic_update_slice_in_dim(out_NHE, out_QHE.astype(out_NHE.dtype), start, 0)

    return lax.fori_loop(0, num_tiles, tile, out_NHE)
