"""Drawing tokens from logits that are split over the vocabulary axis "model".

The noise of a token is a hash of (seed, sample index, position, vocabulary id) and of nothing else,
so a draw does not depend on slot, step, batch mates, mesh or schedule (design section 6). Filters
are applied in the order temperature, top_k, top_p, min_p; tokens that tie with a cut are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from blendjax.packing import NO_TOKEN

_NEG = -jnp.inf
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


class Draw(NamedTuple):
    token_B: Array  # int32
    margin_B: Array  # float32: how far the drawn token was from being another one


def threefry(key0: Array, key1: Array, x0: Array, x1: Array) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al., SC 2011) on broadcast uint32 words."""
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x0 = x0 + x1
            x1 = ((x1 << jnp.uint32(r)) | (x1 >> jnp.uint32(32 - r))) ^ x0
        x0 = x0 + keys[(i + 1) % 3]
        x1 = x1 + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x0, x1


def gumbel(batch: dict[str, Array], id_V: Array) -> Array:
    """Gumbel noise `[B, V]` of each row's next position and each vocabulary id."""
    word = lambda a: a.astype(jnp.uint32)[:, None]
    seed = word(batch["seed"][:, 0]), word(batch["seed"][:, 1])
    key = threefry(*seed, word(batch["sample"]), word(batch["noise_pos"]))
    bits, _ = threefry(*key, id_V.astype(jnp.uint32)[None, :], jnp.uint32(0))
    # u in (0, 1), finest near 0, where the largest noise comes from
    u = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    return -jnp.log(-jnp.log1p(-jnp.minimum(u, 1 - 2.0**-24)))


def _order(x: Array) -> Array:
    """int32 keys that sort as the float32 values do."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


def _cut(key_BV: Array, mass_BV: Array, need_B: Array) -> Array:
    """Largest key t with `sum(mass[key >= t]) >= need`, by bisection over all 2**32 keys."""

    def halve(_: Array, span: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = span  # mass at low reaches the need, at high it doesn't
        mid = (low & high) + ((low ^ high) >> 1)
        above = jnp.where(key_BV >= mid[:, None], mass_BV, 0)
        enough = lax.psum(above.sum(-1, dtype=mass_BV.dtype), "model") >= need_B
        return jnp.where(enough, mid, low), jnp.where(enough, high, mid)

    info = jnp.iinfo(jnp.int32)
    low = jnp.full(need_B.shape, info.min, jnp.int32)
    high = jnp.full(need_B.shape, info.max, jnp.int32)
    return lax.fori_loop(0, 32, halve, (low, high))[0]


def _top_k(score_BV: Array, batch: dict[str, Array]) -> Array:
    key_BV = _order(score_BV)
    cut_B = _cut(key_BV, jnp.ones_like(key_BV), batch["top_k"])
    keep = (key_BV >= cut_B[:, None]) | (batch["top_k"] == 0)[:, None]
    return jnp.where(keep, score_BV, _NEG)


def _top_p(score_BV: Array, prob_BV: Array, batch: dict[str, Array]) -> Array:
    """`prob_BV` is unnormalised and zero where top_k cut."""
    top_p_B = _floats(batch["top_p"])
    key_BV = _order(score_BV)
    total_B = lax.psum(prob_BV.sum(-1), "model")
    cut_B = _cut(key_BV, prob_BV, top_p_B * total_B)
    keep = (key_BV >= cut_B[:, None]) | (top_p_B >= 1.0)[:, None]
    return jnp.where(keep, score_BV, _NEG)


def _floats(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _perturbed(logit_BV: Array, id_V: Array, batch: dict[str, Array]) -> Array:
    """Scores whose argmax is the draw: filtered, divided by the temperature, plus Gumbel noise."""
    temperature_B = _floats(batch["temperature"])
    greedy_B = temperature_B == 0.0
    score_BV = logit_BV / jnp.where(greedy_B, 1.0, temperature_B)[:, None]
    score_BV = lax.cond(batch["counts"][4] > 0, lambda s: _top_k(s, batch), lambda s: s, score_BV)
    top_B1 = lax.pmax(score_BV.max(-1, keepdims=True), "model")
    prob_BV = jnp.exp(score_BV - top_B1)
    score_BV = lax.cond(
        batch["counts"][5] > 0, lambda s, p: _top_p(s, p, batch), lambda s, _: s, score_BV, prob_BV
    )
    score_BV = jnp.where(prob_BV >= _floats(batch["min_p"])[:, None], score_BV, _NEG)
    return jnp.where(greedy_B[:, None], logit_BV, score_BV + gumbel(batch, id_V))


def sample(logit_BV: Array, batch: dict[str, Array], *, vocab: int, margins: bool) -> Draw:
    """One token a row from local logits `[B, V]`; ids at or past `vocab` are padding."""
    v = logit_BV.shape[1]
    first_id = lax.axis_index("model") * v
    id_V = first_id + jnp.arange(v, dtype=jnp.int32)
    logit_BV = jnp.where(id_V < vocab, logit_BV, _NEG)
    logit_BV = _ban(logit_BV, batch["ban"] - first_id)
    score_BV = lax.cond(
        batch["counts"][3] > 0,
        lambda s: _perturbed(s, id_V, batch),
        lambda s: s,
        logit_BV,
    )
    best_B = score_BV.max(-1)
    top_B = lax.pmax(best_B, "model")
    # First id among equals; a row of NaN matches nothing. (XLA:CPU does not vectorise argmax.)
    winner_B = jnp.where(score_BV == top_B[:, None], id_V, jnp.int32(NO_TOKEN)).min(-1)
    token_B = jnp.where(jnp.isfinite(top_B), lax.pmin(winner_B, "model"), jnp.int32(NO_TOKEN))
    margin_B = _margin(score_BV, id_V, token_B, top_B) if margins else jnp.zeros_like(top_B)
    return Draw(token_B, margin_B)


def _ban(logit_BV: Array, column_BX: Array) -> Array:
    if not column_BX.shape[1]:
        return logit_BV
    b, v = logit_BV.shape
    column_BX = jnp.where((column_BX >= 0) & (column_BX < v), column_BX, v)
    return logit_BV.at[jnp.arange(b)[:, None], column_BX].set(_NEG, mode="drop")


def _margin(score_BV: Array, id_V: Array, token_B: Array, top_B: Array) -> Array:
    """Gap between the best and the second best score."""
    rest_BV = jnp.where(id_V == token_B[:, None], _NEG, score_BV)
    return top_B - lax.pmax(rest_BV.max(-1), "model")
