"""Paged attention against dense attention in numpy. Whatever must not be read holds NaN."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blendjax.kernels import reference as ops
from blendjax.packing import TILE


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    lengths: Sequence[int]
    page_size: int = 16
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 16
    dtype: str = "float32"

    @property
    def tolerance(self) -> float:
        """Operands, weights and results are rounded to the dtype; sums are float32 and grow."""
        eps32 = float(np.finfo(np.float32).eps)
        return 4 * float(jnp.finfo(self.dtype).eps) + 2 * eps32 * max(self.lengths)


CASES = [
    Case("one_token", [1]),
    Case("page_boundary", [16, 32, 64]),
    Case("page_boundary_plus_one", [17, 33, 65]),
    Case("block_boundary", [63, 64, 65, 128]),
    Case("every_length", range(128)),
    Case("gqa_1", [5, 70, 130], kv_heads=4, group=1),
    Case("gqa_8", [5, 70, 130], kv_heads=1, group=8),
    Case("head_dim_64", [1, 33, 130], head_dim=64),
    Case("head_dim_80", [1, 33, 130], head_dim=80),
    Case("head_dim_128", [1, 33, 130], head_dim=128),
    Case("page_size_1", [1, 2, 64, 65, 130], page_size=1),
    Case("page_size_4", [3, 4, 5, 64, 130], page_size=4),
    Case("page_size_64", [63, 64, 65, 130], page_size=64),
    Case("page_size_128", [1, 127, 128, 129], page_size=128),
    Case("page_size_48_is_no_divisor_of_a_block", [47, 48, 49, 97], page_size=48),
    Case("batch_7", [1, 2, 3, 90, 4, 5, 6]),
    Case("batch_16", [130, *range(15, 0, -1)]),
    Case("batch_32", [*range(130, 98, -1)]),
    Case("empty_slot", [9, 0, 17, 0]),
    Case("only_empty_slots", [0, 0]),
    Case("bfloat16", [1, 16, 17, 64, 130, 0, 31], dtype="bfloat16"),
    Case("bfloat16_gqa_8_head_dim_128", [1, 65, 130], 64, 1, 8, 128, "bfloat16"),
]


class Paged:
    """Random K and V of each sequence, scattered over the pages of a pool that is NaN elsewhere."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self._rng, self.case = rng, case
        size, k, e = case.page_size, case.kv_heads, case.head_dim
        counts = [-(-length // size) for length in case.lengths]
        num_pages = 1 + sum(counts) + 3
        free = rng.permutation(np.arange(1, num_pages))
        self.table_BP = np.zeros((len(counts), max(counts) + 2), np.int32)
        pools = np.full((2, num_pages, k, size, e), np.nan, np.float32)
        self.keys, self.values = [], []
        for b, (length, count) in enumerate(zip(case.lengths, counts, strict=True)):
            pages, free = free[:count], free[count:]
            self.table_BP[b, :count] = pages
            kv = self.random(2, length, k, e)
            self.keys.append(kv[0])
            self.values.append(kv[1])
            for at in range(length):
                pools[:, pages[at // size], :, at % size] = kv[:, at]
        self.pool = ops.KVPool(*(jnp.asarray(pool, case.dtype) for pool in pools))

    def random(self, *shape: int) -> np.ndarray:
        """Normal values that the dtype represents."""
        return np.asarray(
            jnp.asarray(self._rng.standard_normal(shape), self.case.dtype), np.float32
        )

    def queries(self, rows: int) -> np.ndarray:
        return self.random(rows, self.case.kv_heads * self.case.group, self.case.head_dim)

    def dense(self, q_HE: np.ndarray, seq: int, length: int) -> np.ndarray:
        """One query over the first `length` tokens of a sequence, float64."""
        if not length:
            return np.zeros_like(q_HE)
        k_THE = self.keys[seq][:length].astype(np.float64).repeat(self.case.group, axis=1)
        v_THE = self.values[seq][:length].astype(np.float64).repeat(self.case.group, axis=1)
        score_HT = np.einsum("he,the->ht", q_HE, k_THE) / np.sqrt(self.case.head_dim)
        weight_HT = np.exp(score_HT - score_HT.max(-1, keepdims=True))
        weight_HT /= weight_HT.sum(-1, keepdims=True)
        return np.einsum("ht,the->he", weight_HT, v_THE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decode_equals_dense_attention(case: Case) -> None:
    paged = Paged(case)
    q_BHE = paged.queries(len(case.lengths))
    table_BP = ops.pad_table(jnp.asarray(paged.table_BP), case.page_size)
    lengths_B = jnp.asarray(case.lengths, jnp.int32)
    q = jnp.asarray(q_BHE, case.dtype)
    got = jax.jit(ops.decode_attention)(q, paged.pool, table_BP, lengths_B)
    assert got.dtype == jnp.dtype(case.dtype)
    want = [paged.dense(q_BHE[b], b, length) for b, length in enumerate(case.lengths)]
    got_BHE = np.asarray(got, np.float32)
    np.testing.assert_allclose(got_BHE, np.stack(want), rtol=0, atol=case.tolerance)
    assert not got_BHE[np.asarray(case.lengths) == 0].any(), "an empty slot isn't exactly zero"


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Prefill chunks of one step, (start, rows) of one sequence each, behind some decode rows."""

    name: str
    chunks: Sequence[tuple[int, int]]
    decode_rows: int = 0
    page_size: int = 16
    dtype: str = "float32"


CHUNKS = [
    Chunks("one_row", [(0, 1)]),
    Chunks("tile_less_one", [(0, 31)]),
    Chunks("tile", [(0, 32)]),
    Chunks("tile_plus_one", [(0, 33)]),
    Chunks("two_tiles_plus_one", [(0, 65)]),
    Chunks("starts_mid_page", [(21, 33)]),
    Chunks("starts_at_a_page", [(64, 32)]),
    Chunks("last_prompt_token_after_a_prefix", [(129, 1)]),
    Chunks("several", [(0, 31), (5, 1), (16, 65), (0, 2), (100, 30), (63, 3)]),
    Chunks("behind_decode_rows", [(0, 33), (40, 7), (1, 32)], decode_rows=5),
    Chunks("page_size_1", [(3, 33), (0, 40)], page_size=1),
    Chunks("page_size_64", [(63, 33), (0, 65)], decode_rows=1, page_size=64),
    Chunks("page_size_128", [(100, 33), (0, 5)], page_size=128),
    Chunks("bfloat16", [(0, 31), (21, 33), (129, 1)], decode_rows=3, dtype="bfloat16"),
    Chunks("no_chunks", [], decode_rows=4),
]


def tiles_of(chunks: Chunks) -> list[tuple[int, int, int, int]]:
    """(first token row, rows, sequence, position of the first row), no tile over two sequences."""
    tiles, row = [], chunks.decode_rows
    for seq, (start, rows) in enumerate(chunks.chunks):
        for at in range(0, rows, TILE):
            tiles.append((row + at, min(TILE, rows - at), seq, start + at))
        row += rows
    return tiles


@pytest.mark.parametrize("chunks", CHUNKS, ids=lambda chunks: chunks.name)
def test_prefill_equals_dense_attention(chunks: Chunks) -> None:
    lengths = [start + rows for start, rows in chunks.chunks] or [1]
    case = Case("", lengths, page_size=chunks.page_size, dtype=chunks.dtype)
    paged, tiles = Paged(case), tiles_of(chunks)
    used = chunks.decode_rows + sum(rows for _, rows in chunks.chunks)
    q_NHE = np.full((used + 6 + TILE, *paged.queries(1).shape[1:]), np.nan, np.float32)
    q_NHE[chunks.decode_rows : used] = paged.queries(used - chunks.decode_rows)
    out_NHE = np.zeros_like(q_NHE)
    out_NHE[: chunks.decode_rows] = 7.0  # what decode attention left there
    tile_I4 = np.full((len(tiles) + 2, 4), 10**6, np.int32)  # behind the last tile: garbage
    tile_I4[: len(tiles)] = np.reshape(tiles, (-1, 4))
    got = jax.jit(ops.prefill_attention, static_argnames="tile_rows")(
        jnp.asarray(q_NHE, case.dtype),
        jnp.asarray(out_NHE, case.dtype),
        paged.pool,
        ops.pad_table(jnp.asarray(paged.table_BP), case.page_size),
        jnp.asarray(tile_I4),
        jnp.int32(len(tiles)),
        tile_rows=TILE,
    )
    row = chunks.decode_rows
    for seq, (start, rows) in enumerate(chunks.chunks):
        for at in range(rows):
            out_NHE[row + at] = paged.dense(q_NHE[row + at], seq, start + at + 1)
        row += rows
    got_NHE = np.asarray(got, np.float32)[:used]
    np.testing.assert_allclose(got_NHE, out_NHE[:used], rtol=0, atol=case.tolerance)
    spare_NHE = np.asarray(got, np.float32)[used:]
    assert np.isfinite(spare_NHE).all(), "a row of no tile got NaN: it would poison padding"


def test_decode_equals_prefill_of_one_row() -> None:
    case = Case("", [1, 16, 17, 64, 130])
    paged, count = Paged(case), 5
    q = jnp.asarray(paged.queries(count))
    table_BP = ops.pad_table(jnp.asarray(paged.table_BP), case.page_size)
    decoded = ops.decode_attention(q, paged.pool, table_BP, jnp.asarray(case.lengths, jnp.int32))
    tiles = [(i, 1, i, length - 1) for i, length in enumerate(case.lengths)]
    spare = jnp.pad(q, ((0, TILE), (0, 0), (0, 0)))
    tile_I4 = jnp.asarray(tiles, jnp.int32)
    prefilled = ops.prefill_attention(
        spare,
        jnp.zeros_like(spare),
        paged.pool,
        table_BP,
        tile_I4,
        jnp.int32(count),
        tile_rows=TILE,
    )
    np.testing.assert_allclose(
        np.asarray(decoded), np.asarray(prefilled)[:count], rtol=0, atol=case.tolerance
    )
