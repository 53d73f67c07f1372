"""The algebra of a Llama layer: pure functions of arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


def dense(x_ND: Array, w_DF: Array) -> Array:
    """Matrix product with float32 accumulation, back in x's dtype.

    `preferred_element_type` is stated always: without it a bfloat16 dot on a CPU runs at a
    quarter of its speed.
    """
    dims = (((x_ND.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(x_ND, w_DF, dims, preferred_element_type=jnp.float32).astype(x_ND.dtype)


def rms_norm(x_ND: Array, weight_D: Array, *, eps: float) -> Array:
    """Root-mean-square norm, in float32 inside."""
    x = x_ND.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (x * scale).astype(x_ND.dtype) * weight_D.astype(x_ND.dtype)


def rope_angles(pos_N: Array, inv_freq_J: Array) -> tuple[Array, Array]:
    """cos and sin of position times frequency, float32 [N, 1, J]: once a step for all layers."""
    angle_N1J = pos_N[:, None, None].astype(jnp.float32) * inv_freq_J[None, None, :]
    return jnp.cos(angle_N1J), jnp.sin(angle_N1J)


def rope(x_NHE: Array, cos_N1J: Array, sin_N1J: Array) -> Array:
    """Rotate the two halves of each head (the Hugging Face order of dimensions)."""
    a_NHJ, b_NHJ = jnp.split(x_NHE.astype(jnp.float32), 2, axis=-1)
    turned = (a_NHJ * cos_N1J - b_NHJ * sin_N1J, b_NHJ * cos_N1J + a_NHJ * sin_N1J)
    return jnp.concatenate(turned, axis=-1).astype(x_NHE.dtype)


def swiglu(x_ND: Array, gate_up_D2F: Array, down_FD: Array) -> Array:
    """Gate and up projections ride in one product: gate columns first."""
    gate_NF, up_NF = jnp.split(dense(x_ND, gate_up_D2F), 2, axis=-1)
    return dense(jax.nn.silu(gate_NF) * up_NF, down_FD)


def embed(token_N: Array, embed_VD: Array, *, first_id: Array) -> Array:
    """Rows of the local vocabulary shard, zero for ids of other shards: a psum completes them."""
    row_N = token_N - first_id
    mine_N1 = ((row_N >= 0) & (row_N < embed_VD.shape[0]))[:, None]
    x_ND = jnp.take(embed_VD, row_N, axis=0, mode="clip")
    return jnp.where(mine_N1, x_ND, jnp.zeros((), x_ND.dtype))


def unembed(x_BD: Array, head_VD: Array) -> Array:
    """Logits of the local vocabulary shard, float32."""
    return lax.dot_general(
        x_BD, head_VD, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
