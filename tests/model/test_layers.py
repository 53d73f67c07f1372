"""The algebra of a layer against its formulas, in float64 numpy."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from blendjax.config import ModelConfig
from blendjax.model import layers
from blendjax.model.loader import inverse_frequencies

MODEL = ModelConfig(
    name="m",
    num_layers=1,
    hidden=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn=96,
    vocab=10,
    max_len=64,
    rope_theta=10000.0,
    rms_eps=1e-5,
    tied=True,
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rope_turns_pairs_half_a_head_apart(dtype: str) -> None:
    pos_N, freq_J = np.array([0, 1, 7, 1000, 100_000]), inverse_frequencies(MODEL)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 3, 16)), dtype)
    turn = layers.rope_angles(jnp.asarray(pos_N, jnp.int32), jnp.asarray(freq_J))
    got = layers.rope(x, *turn)
    assert got.dtype == x.dtype
    pair_NHJ = np.asarray(x, np.float64)[..., :8] + 1j * np.asarray(x, np.float64)[..., 8:]
    angle_NJ = (pos_N[:, None].astype(np.float32) * freq_J).astype(np.float64)
    turned = pair_NHJ * np.exp(1j * angle_NJ)[:, None]
    want = np.concatenate([turned.real, turned.imag], axis=-1)
    atol = 4 * float(jnp.finfo(dtype).eps) * 2
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=atol)
    np.testing.assert_array_equal(np.asarray(got)[0], np.asarray(x)[0])


def test_frequencies_and_llama3_factors() -> None:
    want = 10000.0 ** (-np.arange(8) / 8)
    np.testing.assert_allclose(inverse_frequencies(MODEL), want, rtol=3e-7)
    factors = (1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0)
    scaled = inverse_frequencies(dataclasses.replace(MODEL, rope_factors=factors))
    np.testing.assert_allclose(scaled, want / np.array(factors), rtol=3e-7)
    assert scaled.dtype == np.float32


@pytest.mark.parametrize(
    ("dtype", "scale"), [("float32", 1.0), ("bfloat16", 1.0), ("bfloat16", 1e18)]
)
def test_rms_norm(dtype: str, scale: float) -> None:
    """In float32 inside, whatever comes in."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((5, 64)) * scale, dtype)
    weight = jnp.asarray(rng.uniform(0.5, 1.5, 64), dtype)
    got = layers.rms_norm(x, weight, eps=1e-5)
    assert got.dtype == x.dtype
    x64, weight64 = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    want = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-5) * weight64
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=4 * eps, atol=0)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert not layers.rms_norm(jnp.zeros((2, 8)), jnp.ones(8), eps=1e-5).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_swiglu(dtype: str) -> None:
    rng = np.random.default_rng(0)
    x, gate, up, down = (
        jnp.asarray(rng.standard_normal(shape) / 4, dtype)
        for shape in [(3, 16), (16, 24), (16, 24), (24, 16)]
    )
    got = layers.swiglu(x, jnp.concatenate([gate, up], axis=1), down)
    assert got.dtype == x.dtype
    x64, gate64, up64, down64 = (np.asarray(a, np.float64) for a in (x, gate, up, down))
    g = x64 @ gate64
    want = (g / (1 + np.exp(-g)) * (x64 @ up64)) @ down64
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=8 * eps)


def test_dense_sums_in_float32() -> None:
    """Ones that a bfloat16 accumulator would stop counting at 256."""
    ones = jnp.ones((1, 4096), jnp.bfloat16)
    assert float(layers.dense(ones, jnp.ones((4096, 1), jnp.bfloat16))[0, 0]) == 4096.0


def test_embed_gives_each_id_to_one_shard() -> None:
    table_VD = jnp.arange(24, dtype=jnp.float32).reshape(12, 2) + 1.0
    token_N = jnp.array([0, 5, 6, 11, 3], jnp.int32)
    shards = [
        np.asarray(layers.embed(token_N, table_VD[first : first + 4], first_id=jnp.int32(first)))
        for first in (0, 4, 8)
    ]
    np.testing.assert_array_equal(sum(shards), np.asarray(table_VD)[np.asarray(token_N)])
    assert [sum(int(shard[i].any()) for shard in shards) for i in range(5)] == [1] * 5


def test_unembed_is_float32() -> None:
    x, table = jnp.ones((1, 4), jnp.bfloat16), jnp.full((3, 4), 1.0078125, jnp.bfloat16)
    logits = layers.unembed(x, table)
    assert logits.dtype == jnp.float32
    assert logits[0, 0] == 4 * 1.0078125, "logits were rounded to bfloat16"
