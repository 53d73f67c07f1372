"""Whole runs on the fake device: whatever the schedule, every row's text is its own."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from fake_device import VOCAB
from harness import Run, Setup, expected, make_request, prompts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blendjax.core import Request
from blendjax.packing import NO_TOKEN, TILE
from blendjax.sched.batcher import Commit
from blendjax.sched.plan import StepPlan


@st.composite
def rows(draw: st.DrawFn) -> list[Request]:
    made = []
    for i, prompt in enumerate(draw(prompts())):
        max_new = draw(st.integers(1, 10))
        made.append(
            make_request(
                i,
                prompt,
                max_new=max_new,
                stop_ids=draw(st.sets(st.integers(0, VOCAB - 1), max_size=2)),
                min_tokens=draw(st.integers(0, max_new)),
                stop=draw(st.sampled_from([(), ("x",)])),
                temperature=draw(st.sampled_from([0.0, 1.0])),
                top_k=draw(st.sampled_from([0, 3])),
                top_p=draw(st.sampled_from([0.5, 1.0])),
            )
        )
    return made


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    slots = draw(st.integers(1, 6))
    return Setup(
        ranks=draw(st.integers(1, 4)),
        slots=slots,
        page_size=draw(st.sampled_from([1, 2, 4, 16])),
        step_tokens=draw(st.integers(slots, 30)),
        spare_pages=draw(st.sampled_from([0, 0, 1, 2, 5, 1000])),
        policy=draw(st.sampled_from(["dfs", "fcfs"])),
        sharing=draw(st.booleans()),
    )


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rows(), setups())
def test_every_row_gets_the_text_it_would_get_alone(rows: list[Request], setup: Setup) -> None:
    Run(rows, setup).drive().check_answers()


SMALL = Setup(slots=4, page_size=4, spare_pages=0)


def total_stray(run: Run) -> int:
    return sum(sum(commit.stray) for _, commit in run.steps)


def test_rows_are_preempted_and_go_on_where_they_were() -> None:
    rows = [make_request(i, [i, 1, 2], max_new=14) for i in range(4)]
    recomputed: dict[int, int] = {}

    def watch(plan: StepPlan, commit: Commit) -> None:
        recomputed.update((seq.row, seq.recomputed) for seq, _ in commit.ended)

    run = Run(rows, dataclasses.replace(SMALL, spare_pages=1)).drive(watch=watch)
    run.check_answers()
    preempted = {seq.row for plan, _ in run.steps for part in plan.ranks for seq in part.preempts}
    assert run.batcher.preemptions >= 3 and preempted == {1, 2, 3}, "the oldest row always goes on"
    assert {row for row, tokens in recomputed.items() if tokens} == preempted
    total = sum(part.tokens for plan, _ in run.steps for part in plan.ranks)
    useful = sum(len(r.prompt_T) + r.max_new - 1 for r in rows)
    assert total == useful + sum(recomputed.values())


def test_a_row_is_preempted_in_the_middle_of_its_prompt() -> None:
    """The oldest row takes a page a step while the other computes one token a step."""
    rows = [make_request(0, [1, 1], max_new=12), make_request(1, [2] * 11, max_new=2)]
    setup = Setup(slots=2, page_size=1, step_tokens=2, spare_pages=2)
    run = Run(rows, setup).drive()
    run.check_answers()
    (left,) = [i for i, (plan, _) in enumerate(run.steps) if plan.ranks[0].preempts]
    before = [chunk for plan, _ in run.steps[:left] for chunk in plan.ranks[0].chunks]
    assert before[-1].seq.row == 1 and not before[-1].last


def test_the_smallest_pool_has_no_room_for_the_source_of_a_copy() -> None:
    """Row 1 shares five tokens in two pages, and needs both pages of the pool."""
    rows = [make_request(i, [0, 0, 0, 0, 0, i], max_new=3) for i in range(2)]
    run = Run(rows, SMALL).drive()
    run.check_answers()
    assert run.cached == {0: 0, 1: 4}


def test_a_page_that_lies_across_two_nodes_can_be_evicted() -> None:
    """Page 1 belongs to nodes [0 0] and [0 0 1], when row 1 needs the whole pool."""
    prompts = [[0, 0, 1, 5], [3] * 8, [0, 0, 1, 6], [0, 0, 2]]
    rows = [make_request(i, prompt, max_new=1) for i, prompt in enumerate(prompts)]
    Run(rows, dataclasses.replace(SMALL, policy="fcfs", slots=1)).drive().check_answers()


def test_a_rank_without_rows_takes_part_in_every_step() -> None:
    rows = [make_request(i, [i], max_new=3) for i in range(3)]
    run = Run(rows, Setup(ranks=4)).drive()
    run.check_answers()
    assert all(len(plan.ranks) == len(plan.packed) == 4 for plan, _ in run.steps)
    used = {part.rank for plan, _ in run.steps for part in plan.ranks if part.tokens}
    assert len(used) == 3 and len(run.steps) == 3


def test_an_idle_rank_takes_rows_of_the_fullest_queue() -> None:
    rows = [make_request(i, [i, i], max_new=20 if i < 4 else 1) for i in range(8)]
    run = Run(rows, Setup(ranks=2, slots=1, policy="fcfs"))
    home = [run.policy.home(row) for row in range(8)]
    assert home == [0, 0, 0, 0, 1, 1, 1, 1]
    ran = {}

    def watch(plan: StepPlan, commit: Commit) -> None:
        ran.update((seq.row, seq.rank) for seq, _ in commit.ended)

    run.drive(watch=watch).check_answers()
    assert {row for row in ran if ran[row] != home[row]} == {2, 3}, "the last ones of the queue"
    assert len(run.steps) < 50, "alone, rank 0 would take 80 steps"


def test_rows_that_end_by_length_never_ride_a_further_step() -> None:
    rows = [make_request(i, [i, 2], max_new=1 + i) for i in range(7)]
    run = Run(rows, Setup(slots=3)).drive()
    run.check_answers()
    assert total_stray(run) == 0
    draws = sum(1 for plan, _ in run.steps for part in plan.ranks for _ in part.draws())
    assert draws == sum(r.max_new for r in rows)


@pytest.mark.parametrize("by", ["id", "text"])
def test_a_row_that_stops_rides_one_more_step_whose_token_is_dropped(by: str) -> None:
    how = {"stop_ids": {0, 1, 2, 3}} if by == "id" else {"stop": ("x",)}
    rows = [make_request(i, [i, 2], max_new=80, **how) for i in range(6)]
    run = Run(rows, Setup(slots=3)).drive()
    run.check_answers()
    early = [tokens for tokens, reason in run.answers.values() if reason == "stop"]
    assert len(early) == total_stray(run) == 6
    if by == "text":
        assert all(tokens[-1] == tokens[-2] for tokens in early)


def test_stop_ids_count_only_after_min_tokens() -> None:
    stops = set(range(VOCAB - 1))
    (tokens, reason) = (
        Run([make_request(0, [1, 2], max_new=9, min_tokens=4, stop_ids=stops)], Setup())
        .drive()
        .answers[0]
    )
    assert tokens[:4] == [VOCAB - 1] * 4, "all others were banned"
    assert reason == ("stop" if tokens[-1] in stops else "length")
    assert not stops & set(tokens[:-1])


def test_a_stop_string_before_min_tokens_is_passed_over() -> None:
    rows = [make_request(i, [i, 2], max_new=200, min_tokens=40, stop=("x",)) for i in range(4)]
    run = Run(rows, Setup()).drive()
    run.check_answers()
    for tokens, reason in run.answers.values():
        assert reason == "stop" and len(tokens) >= 40
        assert any(a == b for a, b in itertools.pairwise(tokens[:39]))


@pytest.mark.parametrize("spare_pages", [0, 1000])
def test_a_row_without_finite_logits_ends_and_the_others_go_on(spare_pages: int) -> None:
    rows = [make_request(i, [i, 1, 2], max_new=8) for i in range(4)]

    def spoil(plan: StepPlan, drawn: np.ndarray) -> None:
        for part in plan.ranks:
            for i, seq in part.draws():
                if seq.row == 2 and len(seq.generated) == 3:
                    drawn[part.rank, i] = NO_TOKEN

    run = Run(rows, Setup(spare_pages=spare_pages)).drive(spoil=spoil)
    tokens, _ = expected(rows[2])
    assert run.answers.pop(2) == (tokens[:3], None)
    assert run.answers == {i: expected(rows[i]) for i in (0, 1, 3)}


@settings(max_examples=150, deadline=None)
@given(
    prompts(12), st.sampled_from(["dfs", "fcfs"]), st.sampled_from([1, 2, 4, 16]), st.integers(1, 9)
)
def test_a_shared_prefix_is_computed_once(
    prompts: list[list[int]], policy: str, page_size: int, step_tokens: int
) -> None:
    """With ample pages a row computes what no row before it has, but at least its last token."""
    rows = [make_request(i, prompt, max_new=3) for i, prompt in enumerate(prompts)]
    setup = Setup(
        policy=policy, page_size=page_size, step_tokens=step_tokens, slots=min(4, step_tokens)
    )
    run = Run(rows, setup).drive()
    run.check_answers()
    order = (
        sorted(range(len(rows)), key=prompts.__getitem__) if policy == "dfs" else range(len(rows))
    )
    known: set[tuple[int, ...]] = set()
    for row in order:
        prefixes = [tuple(prompts[row][: i + 1]) for i in range(len(prompts[row]))]
        assert run.cached[row] == min(len(prefixes) - 1, sum(p in known for p in prefixes)), row
        known.update(prefixes)
    assert run.prompt_tokens == sum(map(len, prompts)) - sum(run.cached.values())
    if policy == "dfs":  # each distinct token once, and the last one of each copy of a prompt
        copies = len(prompts) - len({tuple(prompt) for prompt in prompts})
        assert run.prompt_tokens == run.tree.distinct_tokens + copies == len(known) + copies


def test_without_prefix_sharing_all_is_computed() -> None:
    rows = [make_request(i, [1] * 9) for i in range(5)]
    run = Run(rows, Setup(sharing=False)).drive()
    run.check_answers()
    assert run.prompt_tokens == 45 and set(run.cached.values()) == {0}


def test_rows_of_one_step_read_what_another_of_them_writes() -> None:
    """Three equal prompts in one step: full pages are shared, the rest is copied along a chain."""
    rows = [make_request(i, [1, 2, 0, 1, 2, 0, 1], max_new=2) for i in range(3)]
    run = Run(rows, Setup(step_tokens=20)).drive()
    run.check_answers()
    (first,) = run.steps[0][0].ranks
    assert [(c.start, c.length) for c in first.chunks] == [(0, 7), (6, 1), (6, 1)]
    assert [copy.tokens for copy in first.copies] == [2, 2]


def test_long_chunks_are_cut_into_tiles() -> None:
    rows = [make_request(i, [1] * (TILE - 1 + i) + [2] * 40, max_new=2) for i in range(3)]
    Run(rows, Setup(step_tokens=2 * TILE + 5, page_size=16)).drive().check_answers()


def test_the_plan_is_the_same_every_time() -> None:
    rows = [make_request(i, [i % 3] * (1 + i), max_new=5, stop_ids={1}) for i in range(9)]
    setup = Setup(ranks=2, spare_pages=1)
    one, two = (Run(rows, setup).drive() for _ in range(2))
    assert len(one.steps) == len(two.steps)
    for (a, _), (b, _) in zip(one.steps, two.steps, strict=True):
        np.testing.assert_array_equal(a.packed, b.packed)
