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
    margin_B: Array  # float32: the gap to the second best score, or less where a cut is nearer


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
    """uint32 keys that sort as the float32 values do."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _cut(key_BV: Array, mass_BV: Array, need_B: Array) -> Array:
    """Largest key t with `sum(mass[key >= t]) >= need`: a radix search over all 2**32 keys.

    A round fixes as many bits as it tries digits for, and ends in one psum: one bit a round is the
    least work on one shard, four are the fewest collectives on several.
    """
    bits = 1 if lax.axis_size("model") == 1 else 4
    digit_R = jnp.arange(1, 1 << bits, dtype=jnp.uint32)

    def fix(i: Array, cut_B: Array) -> Array:
        shift = (32 - bits * (i + 1)).astype(jnp.uint32)
        tried_BR = cut_B[:, None] + (digit_R << shift)
        above = key_BV[:, None, :] >= tried_BR[:, :, None]
        mass_BR = jnp.where(above, mass_BV[:, None, :], 0).sum(-1, dtype=mass_BV.dtype)
        enough_BR = lax.psum(mass_BR, "model") >= need_B[:, None]
        return cut_B + (enough_BR.sum(-1).astype(jnp.uint32) << shift)

    return lax.fori_loop(0, 32 // bits, fix, jnp.zeros(need_B.shape, jnp.uint32))


def _top_k(score_BV: Array, batch: dict[str, Array]) -> Array:
    key_BV = _order(score_BV)
    cut_B = _cut(key_BV, jnp.ones(key_BV.shape, jnp.int32), batch["top_k"])
    keep = (key_BV >= cut_B[:, None]) | (batch["top_k"] == 0)[:, None]
    return jnp.where(keep, score_BV, _NEG)


def _top_p(score_BV: Array, top_B1: Array, batch: dict[str, Array]) -> tuple[Array, Array]:
    """The filtered scores, and how much mass lies between the cut and the next one."""
    top_p_B, key_BV = _floats(batch["top_p"]), _order(score_BV)
    prob_BV = jnp.exp(score_BV - top_B1)
    mass = lambda where: lax.psum(jnp.where(where, prob_BV, 0.0).sum(-1), "model")
    total_B = mass(True)
    cut_B = _cut(key_BV, prob_BV, top_p_B * total_B)
    on = top_p_B < 1.0
    keep = (key_BV >= cut_B[:, None]) | ~on[:, None]
    kept_B, above_B = mass(key_BV >= cut_B[:, None]), mass(key_BV > cut_B[:, None])
    slack_B = jnp.minimum(kept_B / total_B - top_p_B, top_p_B - above_B / total_B)
    return jnp.where(keep, score_BV, _NEG), jnp.where(on, slack_B, jnp.inf)


def _floats(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _filter(score_BV: Array, batch: dict[str, Array]) -> tuple[Array, Array]:
    """Scores with -inf where top_k, top_p or min_p cut, and each row's distance from another cut:
    the gap in score between the last token kept and the first one dropped, or less."""
    before_BV = score_BV
    never_B = jnp.full(score_BV.shape[:1], jnp.inf)
    score_BV = lax.cond(batch["counts"][4] > 0, lambda s: _top_k(s, batch), lambda s: s, score_BV)
    top_B1 = lax.pmax(score_BV.max(-1, keepdims=True), "model")
    score_BV, slack_B = lax.cond(
        batch["counts"][5] > 0,
        lambda s: _top_p(s, top_B1, batch),
        lambda s: (s, never_B),
        score_BV,
    )
    floor_B1 = top_B1 + jnp.log(_floats(batch["min_p"]))[:, None]
    to_floor_B = jnp.where(score_BV > _NEG, jnp.abs(score_BV - floor_B1), jnp.inf).min(-1)
    floor_slack_B = lax.pmin(to_floor_B, "model")
    score_BV = jnp.where(score_BV >= floor_B1, score_BV, _NEG)
    kept = score_BV > _NEG
    last_B = lax.pmin(jnp.where(kept, before_BV, jnp.inf).min(-1), "model")
    next_B = lax.pmax(jnp.where(kept, _NEG, before_BV).max(-1), "model")
    slack_B = jnp.minimum(slack_B, floor_slack_B)
    return score_BV, jnp.minimum(slack_B, last_B - next_B)


def _perturbed(logit_BV: Array, id_V: Array, batch: dict[str, Array]) -> tuple[Array, Array]:
    """Scores whose argmax is the draw (filtered, divided by the temperature, plus Gumbel noise),
    and each row's distance from another cut."""
    temperature_B = _floats(batch["temperature"])
    greedy_B = temperature_B == 0.0
    score_BV = logit_BV / jnp.where(greedy_B, 1.0, temperature_B)[:, None]
    score_BV, slack_B = _filter(score_BV, batch)
    score_BV = score_BV + gumbel(batch, id_V)
    slack_B = jnp.where(greedy_B, jnp.inf, slack_B)
    return jnp.where(greedy_B[:, None], logit_BV, score_BV), slack_B


def sample(logit_BV: Array, batch: dict[str, Array], *, vocab: int, margins: bool) -> Draw:
    """One token a row from local logits `[B, V]`; ids at or past `vocab` are padding."""
    v = logit_BV.shape[1]
    first_id = lax.axis_index("model") * v
    id_V = first_id + jnp.arange(v, dtype=jnp.int32)
    if lax.axis_size("model") * v != vocab:
        logit_BV = jnp.where(id_V < vocab, logit_BV, _NEG)
    logit_BV = _ban(logit_BV, batch["ban"] - first_id)
    score_BV, slack_B = lax.cond(
        batch["counts"][3] > 0,
        lambda s: _perturbed(s, id_V, batch),
        lambda s: (s, jnp.full(s.shape[:1], jnp.inf)),
        logit_BV,
    )
    best_B, column_B = _first_best(score_BV)
    top_B = lax.pmax(best_B, "model")
    mine_B = jnp.where(best_B == top_B, first_id + column_B, jnp.int32(NO_TOKEN))
    token_B = jnp.where(jnp.isfinite(top_B), lax.pmin(mine_B, "model"), jnp.int32(NO_TOKEN))
    if not margins:
        return Draw(token_B, jnp.zeros_like(top_B))
    rest_BV = jnp.where(id_V == token_B[:, None], _NEG, score_BV)
    gap_B = top_B - lax.pmax(rest_BV.max(-1), "model")
    return Draw(token_B, jnp.minimum(gap_B, slack_B))


def _first_best(score_BV: Array) -> tuple[Array, Array]:
    """Maximum and the first column that has it, in one pass over the scores.

    XLA:CPU vectorises a maximum but not an argmax: take the maximum of blocks, then look for the
    column inside the winning block only.
    """
    b, v = score_BV.shape
    width = next(w for w in (128, 96, 64, 48, 32, 16, 8, 4, 2, 1) if v % w == 0)
    block_BUW = score_BV.reshape(b, v // width, width)
    best_BU = block_BUW.max(-1)
    best_B = best_BU.max(-1)
    block_B = jnp.argmax(best_BU == best_B[:, None], axis=-1)
    row_BW = jnp.take_along_axis(block_BUW, block_B[:, None, None], axis=1)[:, 0]
    column_B = block_B * width + jnp.argmax(row_BW == best_B[:, None], axis=-1)
    return best_B, column_B.astype(jnp.int32)


def _ban(logit_BV: Array, column_BX: Array) -> Array:
    if not column_BX.shape[1]:
        return logit_BV
    b, v = logit_BV.shape
    column_BX = jnp.where((column_BX >= 0) & (column_BX < v), column_BX, v)
    return logit_BV.at[jnp.arange(b)[:, None], column_BX].set(_NEG, mode="drop")
