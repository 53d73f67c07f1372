"""Writing and copying KV pages: every other byte of the pool stays what it was."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blendjax.kernels import reference as ops

PAGES, HEADS, E = 9, 2, 8


def random_pool(page_size: int, dtype: str, *, seed: int = 0) -> ops.KVPool:
    """Every second page holds NaN."""
    pools = np.random.default_rng(seed).standard_normal((2, PAGES, HEADS, page_size, E))
    pools[:, ::2] = np.nan
    return ops.KVPool(*(jnp.asarray(pool, dtype) for pool in pools))


def bits(array: jax.Array) -> np.ndarray:
    """Compares NaN by its bits."""
    host = np.asarray(array)
    return host.view({2: np.uint16, 4: np.uint32}[host.dtype.itemsize])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_write_kv_touches_its_slots_only(page_size: int, dtype: str) -> None:
    pool, rng = random_pool(page_size, dtype), np.random.default_rng(1)
    slots = rng.permutation(np.arange(page_size, PAGES * page_size))[:7]
    slot_N = np.zeros(12, np.int32)  # padding writes to the scratch page 0, over and over
    slot_N[[0, 1, 2, 4, 5, 8, 9]] = slots
    k_NKE, v_NKE = rng.standard_normal((2, 12, HEADS, E)).astype(np.float32)
    got = jax.jit(ops.write_kv)(pool, jnp.asarray(k_NKE), jnp.asarray(v_NKE), jnp.asarray(slot_N))
    for before, after, new_NKE in zip(pool, got, (k_NKE, v_NKE), strict=True):
        want = bits(before).copy()
        for row in np.flatnonzero(slot_N):
            page, offset = divmod(int(slot_N[row]), page_size)
            want[page, :, offset] = bits(jnp.asarray(new_NKE[row], dtype))
        want[0, :, 0] = bits(after)[0, :, 0]  # whichever padding row came last
        np.testing.assert_array_equal(bits(after), want)


def test_write_kv_drops_what_lies_outside_the_pool() -> None:
    pool = random_pool(4, "float32")
    rows = jnp.ones((2, HEADS, E), jnp.float32)
    got = ops.write_kv(pool, rows, rows, jnp.array([PAGES * 4, 10**6], jnp.int32))
    np.testing.assert_array_equal(bits(got.k_MKSE), bits(pool.k_MKSE))


COPIES = {
    "one": [(1, 3, 5)],
    "whole_page": [(1, 2, 16)],
    "nothing": [(1, 3, 0)],
    "chain": [(1, 3, 9), (3, 5, 7), (5, 7, 4)],
    "one_source_twice": [(1, 3, 9), (1, 5, 2)],
    "of_nan": [(2, 3, 5)],
    "none": [],
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("copies", COPIES.values(), ids=COPIES.keys())
def test_copy_pages_in_order(copies: list[tuple[int, int, int]], dtype: str) -> None:
    pool = random_pool(16, dtype)
    copy_C3 = np.full((len(copies) + 2, 3), 4, np.int32)  # behind the last copy: to be ignored
    copy_C3[: len(copies)] = np.reshape(copies, (-1, 3))
    got = jax.jit(ops.copy_pages)(pool, jnp.asarray(copy_C3), jnp.int32(len(copies)))
    for before, after in zip(pool, got, strict=True):
        want = bits(before).copy()
        for source, target, tokens in copies:
            want[target, :, :tokens] = want[source, :, :tokens]
        np.testing.assert_array_equal(bits(after), want)
