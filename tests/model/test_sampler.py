"""Draws against plain numpy: which ids may be drawn, how often, and what a draw depends on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from blendjax.core import Sampling
from blendjax.model import sampler
from blendjax.packing import NO_TOKEN
from tests.tiny import naive_filter, naive_noise, threefry


@dataclasses.dataclass(frozen=True)
class Row:
    """What decides a row's draw, apart from its logits."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    pos: int = 0
    sample: int = 0
    bans: tuple[int, ...] = ()


GREEDY = Row(temperature=0.0)


def batch_of(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """The sampler's fields of a packed step."""
    column = lambda name, dtype: np.array([getattr(row, name) for row in rows], dtype)
    ban = np.full((len(rows), max(len(row.bans) for row in rows)), -1, np.int32)
    for i, row in enumerate(rows):
        ban[i, : len(row.bans)] = row.bans
    flags = [
        any(row.temperature for row in rows),
        any(row.top_k for row in rows),
        any(row.top_p != 1.0 for row in rows),
    ]
    floats = {name: column(name, np.float32).view(np.int32) for name in FLOATS}
    return floats | {
        "top_k": column("top_k", np.int32),
        "seed": column("seed", np.uint64).view(np.int32).reshape(-1, 2),
        "noise_pos": column("pos", np.int32),
        "sample": column("sample", np.int32),
        "ban": ban,
        "counts": np.array([0, 0, 0, *flags], np.int32),
    }


FLOATS = ("temperature", "top_p", "min_p")


@cache
def split(part: Callable[..., Any], shards: int, vocab: int) -> Callable[..., Any]:
    """`part(local logits, batch, vocab)` jitted over a vocabulary split in so many shards."""
    mesh = Mesh(np.array(jax.devices()[:shards]), ("model",))
    run = jax.shard_map(
        lambda logit_BV, batch: part(logit_BV, batch, vocab),
        mesh=mesh,
        in_specs=(P(None, "model"), P()),
        out_specs=P() if part is _draw else P(None, "model"),
        check_vma=False,
    )
    return jax.jit(run)


def _draw(logit_BV: Array, batch: dict[str, Array], vocab: int) -> sampler.Draw:
    return sampler.sample(logit_BV, batch, vocab=vocab, margins=True)


def _scores(logit_BV: Array, batch: dict[str, Array], vocab: int) -> Array:
    id_V = jax.lax.axis_index("model") * logit_BV.shape[1] + jnp.arange(
        logit_BV.shape[1], dtype=jnp.int32
    )
    return sampler._perturbed(logit_BV, id_V, batch)[0]


def run(part: Callable[..., Any], logit_BV: np.ndarray, rows: Sequence[Row], shards: int) -> Any:
    """Logits are padded to whole shards with values that would win if they weren't masked."""
    vocab = logit_BV.shape[1]
    pad = 1e9 if part is _draw else -np.inf
    padded = np.pad(logit_BV, ((0, 0), (0, -vocab % shards)), constant_values=pad)
    return split(part, shards, vocab)(padded.astype(np.float32), batch_of(rows))


def draw(logit_BV: np.ndarray, rows: Sequence[Row], *, shards: int = 1) -> np.ndarray:
    return np.asarray(run(_draw, logit_BV, rows, shards).token_B)


def margins(logit_BV: np.ndarray, rows: Sequence[Row], *, shards: int = 1) -> np.ndarray:
    return np.asarray(run(_draw, logit_BV, rows, shards).margin_B)


def random_logits(rows: int, vocab: int, *, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_greedy_is_argmax_and_its_margin_the_top_2_gap(shards: int) -> None:
    logit_BV = random_logits(16, 37)
    second, best = np.sort(logit_BV, axis=1)[:, -2:].T
    np.testing.assert_array_equal(draw(logit_BV, [GREEDY] * 16, shards=shards), logit_BV.argmax(1))
    got = margins(logit_BV, [GREEDY] * 16, shards=shards)
    np.testing.assert_allclose(got, best - second, rtol=1e-6)


@pytest.mark.parametrize("shards", [1, 4])
def test_greedy_takes_the_lowest_of_equal_ids(shards: int) -> None:
    logit_BV = np.zeros((2, 16), np.float32)
    logit_BV[1, [5, 13]] = 2.0
    assert draw(logit_BV, [GREEDY] * 2, shards=shards).tolist() == [0, 5]
    assert margins(logit_BV, [GREEDY] * 2, shards=shards).tolist() == [0.0, 0.0]


def test_greedy_is_untouched_by_filters_and_by_random_neighbours() -> None:
    logit_BV = random_logits(16, 37)
    rows = [dataclasses.replace(GREEDY, top_p=0.5), Row(top_k=3, top_p=0.9)] * 8
    tokens = draw(logit_BV, rows)
    np.testing.assert_array_equal(tokens[::2], logit_BV[::2].argmax(1))


def allowed(logit_V: np.ndarray, row: Row) -> set[int]:
    """The ids that may be drawn, as the oracle says."""
    filters = Sampling(
        temperature=row.temperature, top_k=row.top_k, top_p=row.top_p, min_p=row.min_p
    )
    return set(np.flatnonzero(naive_filter(logit_V, filters)).tolist())


FILTERS = [
    Row(),
    Row(top_k=1),
    Row(top_k=5),
    Row(top_k=37),
    Row(top_k=1000),
    Row(top_p=0.9),
    Row(top_p=0.5),
    Row(top_p=1e-5),
    Row(top_p=0.999),
    Row(min_p=0.1),
    Row(min_p=0.9),
    Row(min_p=1.0),
    Row(top_k=10, top_p=0.7),
    Row(top_k=20, top_p=0.95, min_p=0.05),
    Row(temperature=0.3, top_p=0.9),
    Row(temperature=3.0, top_k=7, min_p=0.2),
]


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("kind", ["random", "ties", "negative", "wide"])
def test_filters_allow_what_numpy_allows(kind: str, shards: int) -> None:
    logit_BV = random_logits(len(FILTERS), 37, seed=3)
    if kind == "ties":
        logit_BV = np.round(logit_BV / 2) + 0.0  # no -0.0
    elif kind == "negative":
        logit_BV -= 50
    elif kind == "wide":
        logit_BV *= 30
    score_BV = np.asarray(run(_scores, logit_BV, FILTERS, shards))[:, :37]
    for logit_V, score_V, row in zip(logit_BV, score_BV, FILTERS, strict=True):
        assert set(np.flatnonzero(score_V > -np.inf).tolist()) == allowed(logit_V, row), row


def test_only_allowed_ids_are_drawn() -> None:
    logit_V = random_logits(1, 37, seed=5)[0]
    for row in (Row(top_k=4), Row(top_p=0.6), Row(min_p=0.2)):
        rows = [dataclasses.replace(row, seed=seed) for seed in range(500)]
        drawn = set(draw(np.tile(logit_V, (500, 1)), rows).tolist())
        assert drawn <= allowed(logit_V, row)
        assert len(drawn) > 1


@pytest.mark.parametrize("axis", ["seed", "pos", "sample"])
@pytest.mark.parametrize("row", [Row(), Row(temperature=0.5), Row(top_k=6)], ids=str)
def test_frequencies_are_the_probabilities(row: Row, axis: str) -> None:
    """4000 draws that differ in one thing only. Chi-square at a significance of 1e-4; no chance in
    it, the seeds are fixed."""
    logit_V = random_logits(1, 12, seed=7)[0] / 2
    rows = [dataclasses.replace(row, **{axis: i}) for i in range(4000)]
    counts = np.bincount(draw(np.tile(logit_V, (4000, 1)), rows), minlength=12)
    ids = sorted(allowed(logit_V, row))
    prob = np.exp(logit_V[ids].astype(np.float64) / row.temperature)
    expected = 4000 * prob / prob.sum()
    assert counts.sum() == counts[ids].sum() == 4000
    rare = expected < 5  # too few for the test's law: count them as one
    got = [*counts[ids][~rare], counts[ids][rare].sum()]
    want = [*expected[~rare], max(expected[rare].sum(), 1e-9)]
    chi2 = sum((g - w) ** 2 / w for g, w in zip(got, want, strict=True) if w > 1)
    assert chi2 < 39.0, (chi2, got, want)  # 12 outcomes: 11 degrees of freedom at most


CLOSE = {
    "top_k": (Row(top_k=2), [3.0, 2.0, 2.0 - 1e-4, 0.0]),
    "top_p": (Row(top_p=0.5 + 1e-4), [2.0, 2.0 - 1e-6, -20.0, -20.0]),
    "min_p": (Row(min_p=0.5), [3.0, 3.0 + float(np.log(0.5)) + 1e-4, 0.0, 0.0]),
}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kind", CLOSE)
def test_an_id_close_to_a_cut_makes_a_near_tie(kind: str, shards: int) -> None:
    """What another order of additions may let in or shut out, whatever noise says."""
    row, logits = CLOSE[kind]
    rows = [dataclasses.replace(row, seed=seed) for seed in range(8)]
    logit_BV = np.tile(np.array(logits, np.float32), (8, 1))
    assert (margins(logit_BV, rows, shards=shards) < 1e-3).all()
    far = margins(random_logits(8, 4) * 3, [Row(seed=seed) for seed in range(8)], shards=shards)
    assert (far > 1e-3).all()


def test_draws_do_not_depend_on_how_the_vocabulary_is_split() -> None:
    logit_BV = random_logits(len(FILTERS) * 8, 266, seed=9)
    rows = [dataclasses.replace(row, seed=2**40 + i) for i in range(8) for row in FILTERS]
    whole = draw(logit_BV, rows)
    for shards in (2, 4, 8):
        np.testing.assert_array_equal(draw(logit_BV, rows, shards=shards), whole)


def test_draws_do_not_depend_on_the_place_in_the_batch() -> None:
    logit_BV = random_logits(16, 37, seed=11)
    rows = [dataclasses.replace(FILTERS[i], seed=i, pos=3 * i) for i in range(16)]
    order = np.random.default_rng(0).permutation(16)
    shuffled = draw(logit_BV[order], [rows[i] for i in order])
    np.testing.assert_array_equal(shuffled, draw(logit_BV, rows)[order])
    one_by_one = [draw(logit_BV[i : i + 1], [rows[i]])[0] for i in range(16)]
    np.testing.assert_array_equal(one_by_one, draw(logit_BV, rows))


def test_noise_differs_with_seed_sample_and_position() -> None:
    """Equal logits: two rows draw the same of 4096 ids by a chance of 1 in 4096."""
    changes = [
        *({"seed": seed} for seed in (0, 1, 2, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 - 1)),
        *({"pos": pos} for pos in (1, 2, 3, 511)),
        *({"sample": sample} for sample in (1, 2, 3)),
        {"pos": 1, "sample": 1},
        {"seed": 1, "pos": 1},
    ]
    rows = [dataclasses.replace(Row(), **change) for change in changes]
    tokens = draw(np.zeros((len(rows), 4096), np.float32), rows)
    assert len(set(tokens.tolist())) == len(rows)


def test_noise_is_the_documented_hash() -> None:
    rows = [Row(seed=2**35 + 17, pos=5, sample=2), Row(seed=1)]
    score_BV = np.asarray(run(_scores, np.zeros((2, 50), np.float32), rows, 1))
    for row, got_V in zip(rows, score_BV, strict=True):
        want_V = naive_noise(row.seed, row.pos, 50, sample=row.sample)
        np.testing.assert_allclose(got_V, want_V, rtol=1e-5, atol=1e-6)


def test_threefry_gives_the_published_vectors() -> None:
    """Known answers of Random123 for threefry2x32 with 20 rounds."""
    word = lambda *values: jnp.array(values, jnp.uint32)
    got = sampler.threefry(
        word(0, 0xFFFFFFFF, 0x13198A2E),
        word(0, 0xFFFFFFFF, 0x03707344),
        word(0, 0xFFFFFFFF, 0x243F6A88),
        word(0, 0xFFFFFFFF, 0x85A308D3),
    )
    assert np.asarray(got[0]).tolist() == [0x6B200159, 0x1CB996FC, 0xC4923A9C]
    assert np.asarray(got[1]).tolist() == [0x99BA4EFE, 0xBB002BE7, 0x483DF7A0]


def test_threefry_equals_that_of_jax() -> None:
    rng = np.random.default_rng(0)
    key, counts = (rng.integers(0, 2**32, n, dtype=np.uint32) for n in (2, 200))
    got = sampler.threefry(*jnp.asarray(key), *jnp.asarray(counts).reshape(2, 100))
    np.testing.assert_array_equal(np.concatenate(got), threefry(key, counts))


@pytest.mark.parametrize("shards", [1, 4])
def test_banned_ids_are_never_drawn(shards: int) -> None:
    """They are the best and the second best, at both ends of the vocabulary."""
    logit_BV = random_logits(40, 37, seed=13)
    logit_BV[:, [0, 36]] = 50.0
    kinds = (GREEDY, Row(), Row(top_k=2), Row(top_p=0.5), Row(min_p=0.9))
    rows = [dataclasses.replace(row, seed=seed, bans=(0, 36)) for seed in range(8) for row in kinds]
    tokens = draw(logit_BV, rows, shards=shards)
    assert not set(tokens.tolist()) & {0, 36}
    np.testing.assert_array_equal(tokens[::5], logit_BV[::5, 1:36].argmax(1) + 1)
    unbanned = draw(logit_BV, [GREEDY] * 39 + [rows[0]], shards=shards)
    assert (unbanned[:39] == 0).all(), "a row's ban reached its neighbours"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shards", [1, 4])
def test_scores_that_are_not_finite_draw_no_token(value: float, shards: int) -> None:
    rows = [*FILTERS, GREEDY]
    logit_BV = random_logits(2 * len(rows), 37, seed=15)
    logit_BV[1::2] = value
    pairs = [row for row in rows for _ in range(2)]
    tokens = draw(logit_BV, pairs, shards=shards)
    assert (tokens[1::2] == NO_TOKEN).all()
    logit_BV[1::2] = 0.0
    np.testing.assert_array_equal(tokens[::2], draw(logit_BV, pairs, shards=shards)[::2])


@pytest.mark.parametrize("shards", [1, 4])
def test_one_score_that_is_not_finite_is_never_drawn(shards: int) -> None:
    logit_BV = random_logits(len(FILTERS), 37, seed=17)
    logit_BV[:, 20] = np.nan
    assert 20 not in draw(logit_BV, FILTERS, shards=shards)
