"""The packed buffer of a step: its fields, and what the scheduler writes into them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendjax.core import Request, Sampling
from blendjax.packing import (
    FIELDS,
    TILE,
    Bucket,
    float_bits,
    pack_into,
    packed_size,
    spans,
    unpack,
)
from blendjax.sched.pack import Packer
from blendjax.sched.plan import Chunk, PageCopy, RankPlan
from blendjax.sched.plan import Sequence as Row

BUCKETS = [
    Bucket(1, 1, 1),
    Bucket(16, 16, 3),
    Bucket(256, 128, 9, 3),
    Bucket(7, 12, 2, 1),
]
any_bucket = pytest.mark.parametrize("bucket", BUCKETS, ids=str)


@any_bucket
def test_fields_cover_the_buffer_and_do_not_overlap(bucket: Bucket) -> None:
    at = 0
    for name, span in spans(bucket):
        assert span.start == at, name
        assert span.stop - span.start == np.prod(span.shape, dtype=int)
        at = span.stop
    assert at == packed_size(bucket)
    assert [name for name, _ in spans(bucket)] == list(FIELDS)


@any_bucket
def test_what_is_packed_is_unpacked(bucket: Bucket) -> None:
    packed = np.full(packed_size(bucket), 99, np.int32)
    views = pack_into(packed, bucket)
    assert all((view == (-1 if name == "ban" else 0)).all() for name, view in views.items())
    rng = np.random.default_rng(0)
    for view in views.values():
        view[:] = rng.integers(-(2**31), 2**31, view.shape, np.int32)
    for name, values in unpack(packed, bucket).items():
        np.testing.assert_array_equal(values, views[name])
    assert views["ban"].shape == (bucket.seqs, bucket.bans)
    assert views["page"].shape == (bucket.seqs, bucket.pages)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=9))
def test_a_bucket_has_tiles_for_any_chunks(chunks: list[int]) -> None:
    bucket = Bucket(sum(chunks), len(chunks), 1)
    assert sum(-(-chunk // TILE) for chunk in chunks) <= bucket.tiles


def test_floats_travel_as_their_bits() -> None:
    values = np.array([0.0, 1.0, 0.7, 1e-9], np.float32)
    assert float_bits(values).dtype == np.int32
    np.testing.assert_array_equal(float_bits(values).view(np.float32), values)
    assert float_bits(np.ones(1))[0] == 0x3F800000


SIZE, SLOTS = 4, 6  # page size; the scratch slot is number 6
TABLE = np.zeros((SLOTS, 12), np.int32)
TABLE[:4] = np.arange(1, 49).reshape(4, 12)


@dataclasses.dataclass
class Step:
    bucket: Bucket
    plan: RankPlan
    view: dict[str, np.ndarray]


def row(slot: int, prompt: Sequence[int], *, made: Sequence[int] = (), **fields: Any) -> Row:
    """A running row whose prefill is planned and that draws a token in this step."""
    request = Request(
        index=10 + slot,
        line=1,
        custom_id="a",
        kind="chat",
        prompt_T=np.array(prompt, np.int32),
        sampling=Sampling(**fields),
        seed=fields.get("seed", 0),
        max_new=50,
        stop_ids=frozenset({7, 5}),
    )
    size = len(prompt) + len(made)
    return Row(
        request,
        slot,
        slot=slot,
        prefill_len=size,
        computed=size,
        planned=1 + len(made),
        generated=list(made),
    )


def pack(plan: RankPlan, *others: RankPlan, bucket: Bucket) -> Step:
    plans = [plan, *others]
    packed = Packer(SIZE, SLOTS).pack(plans, [TABLE] * len(plans), bucket)
    assert packed.shape == (len(plans), packed_size(bucket)) and packed.dtype == np.int32
    return Step(bucket, plan, unpack(packed[0], bucket))


def mixed() -> Step:
    """Two decode rows, the middle of a long prompt, and the end of one that was preempted."""
    decodes = [row(2, [1] * 9, min_tokens=3), row(0, [1] * 4, temperature=0.0, top_k=3)]
    decodes[0].planned = 4
    long, back = row(3, range(100, 148)), row(1, [50, 51], made=[60, 61, 62], seed=2**63 + 9)
    plan = RankPlan(
        0,
        decodes=decodes,
        contexts=np.array([10, 5], np.int32),
        chunks=[Chunk(long, 6, TILE + 3), Chunk(back, 1, 4)],
        copies=[PageCopy(40, 20, 2), PageCopy(20, 30, 1)],
    )
    return pack(plan, bucket=Bucket(48, 8, 12, 2))


def test_decode_rows_come_first() -> None:
    view = mixed().view
    assert view["counts"][:3].tolist() == [2, 3, 2]
    assert view["pos"][:2].tolist() == [9, 4]
    assert view["kv_len"].tolist() == [10, 5, 0, 0, 0, 0, 0, 0]
    pages = TABLE[2, 9 // SIZE], TABLE[0, 4 // SIZE]
    assert view["kv_slot"][:2].tolist() == [pages[0] * SIZE + 1, pages[1] * SIZE]
    assert view["noise_pos"][:2].tolist() == [10, 5], "the position of the token that is drawn"
    assert view["last_row"][:2].tolist() == [0, 1]
    assert view["page"][:4].tolist() == TABLE[[2, 0, 3, 1]].tolist()


def test_chunks_follow_and_tiles_cover_them() -> None:
    step = mixed()
    view, length = step.view, TILE + 3
    assert view["token"][2 : 2 + length].tolist() == list(range(106, 106 + length))
    assert view["pos"][2 : 2 + length].tolist() == list(range(6, 6 + length))
    assert view["kv_slot"][2 : 2 + length].tolist() == [
        TABLE[3, at // SIZE] * SIZE + at % SIZE for at in range(6, 6 + length)
    ]
    assert view["token"][2 + length : 6 + length].tolist() == [51, 60, 61, 62]
    assert view["tile"][:3].tolist() == [
        [2, TILE, 2, 6],
        [2 + TILE, 3, 2, 6 + TILE],
        [5 + TILE, 4, 3, 1],
    ]
    assert view["copy"][:2].tolist() == [[40, 20, 2], [20, 30, 1]]


def test_only_finished_chunks_draw() -> None:
    view = mixed().view
    assert view["slot"].tolist() == [2, 0, SLOTS, 1, SLOTS, SLOTS, SLOTS, SLOTS]
    assert view["last_row"][3] == 2 + TILE + 3 + 3
    assert view["noise_pos"][3] == 5
    assert np.ascontiguousarray(view["seed"][3]).view(np.uint64)[0] == 2**63 + 9


def test_padding_is_zeros() -> None:
    view, used = mixed().view, 2 + TILE + 3 + 4
    for name in ("token", "pos", "kv_slot"):
        assert not view[name][used:].any(), name
    for name in ("page", "last_row", "noise_pos", "temperature", "top_k", "seed"):
        assert not view[name][4:].any(), name
    assert not view["tile"][3:].any() and not view["copy"][2:].any()
    assert not view["last_row"][2] and not view["temperature"][2], (
        "an unfinished chunk draws nothing"
    )


def test_ids_are_banned_until_min_tokens_are_drawn() -> None:
    bans = []
    for planned in (1, 3, 4):
        seq = row(1, [1, 2], min_tokens=3)
        seq.planned = planned
        plan = RankPlan(0, decodes=[seq], contexts=np.array([3], np.int32))
        bans.append(pack(plan, bucket=Bucket(2, 2, 12, 3)).view["ban"].tolist())
    none = [-1, -1, -1]
    assert bans == [[[5, 7, -1], none], [[5, 7, -1], none], [none, none]]


def test_a_bucket_without_bans_takes_rows_without_min_tokens() -> None:
    plan = RankPlan(0, decodes=[row(1, [1, 2])], contexts=np.array([3], np.int32))
    assert pack(plan, bucket=Bucket(2, 2, 12)).view["ban"].shape == (2, 0)


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5}, [0, 0, 0]),
        ({}, [1, 0, 0]),
        ({"top_k": 5}, [1, 1, 0]),
        ({"top_p": 0.5}, [1, 0, 1]),
        ({"min_p": 0.5}, [1, 0, 0]),
    ],
)
def test_every_rank_is_told_what_any_row_needs(fields: dict[str, Any], flags: list[int]) -> None:
    """The sampler's branches hold collectives: all ranks must take the same one."""
    plan = RankPlan(0, decodes=[row(1, [1, 2], **fields)], contexts=np.array([3], np.int32))
    bucket = Bucket(2, 2, 12, 2)
    for step in (pack(plan, RankPlan(1), bucket=bucket), pack(RankPlan(0), plan, bucket=bucket)):
        assert step.view["counts"][3:].tolist() == flags


def test_sampling_fields() -> None:
    fields = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "top_k": 4}
    plan = RankPlan(0, decodes=[row(1, [1, 2], **fields)], contexts=np.array([3], np.int32))
    view = pack(plan, bucket=Bucket(1, 1, 12)).view
    for name in ("temperature", "top_p", "min_p"):
        assert view[name].view(np.float32)[0] == np.float32(fields[name])
    assert view["top_k"][0] == 4 and view["sample"][0] == 0


def test_tokens_of_a_row_that_was_preempted_go_over_the_border() -> None:
    seq = row(1, [50, 51], made=[60, 61, 62])
    for start, length in ((0, 2), (0, 5), (2, 3), (4, 1)):
        step = pack(RankPlan(0, chunks=[Chunk(seq, start, length)]), bucket=Bucket(5, 1, 12, 2))
        assert step.view["token"][:length].tolist() == [50, 51, 60, 61, 62][start : start + length]


def test_values_past_what_the_device_holds_are_brought_to_the_nearest() -> None:
    """A top_k over int32 filters nothing; a temperature or top_p that float32 would lose is greedy
    or the smallest set, never a division by zero or an empty set."""
    huge = row(0, [1, 2], temperature=1.0, top_k=10**20, top_p=1e-46)
    cold = row(1, [3, 4], temperature=1e-37)
    chunks = [Chunk(huge, 0, 2), Chunk(cold, 0, 2)]
    view = pack(RankPlan(0, chunks=chunks), bucket=Bucket(32, 4, TABLE.shape[1])).view
    assert view["top_k"][0] == 2**31 - 1
    assert view["top_p"][:1].view(np.float32) > 0
    assert view["temperature"][1] == 0
