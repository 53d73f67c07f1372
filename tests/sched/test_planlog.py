"""From the lines of the plan log alone: no row is lost, and every time can be worked out again."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

import pytest
from harness import Run, Setup, make_request, prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cost import TINY

from blendjax.config import HeadLayout
from blendjax.core import Request
from blendjax.sched import planlog
from blendjax.sched.batcher import Commit
from blendjax.sched.cost import CostModel
from blendjax.sched.hardware import CHIPS
from blendjax.sched.plan import StepPlan

Line = dict[str, Any]


def logged(requests: list[Request], setup: Setup, tp: int = 1) -> tuple[Run, Line, list[Line]]:
    """The run, and its log as it comes back from the file."""
    cost = CostModel(TINY, HeadLayout.of(TINY, tp), CHIPS["v5e"], 2)
    run, lines = Run(requests, setup), list[Line]()

    def watch(plan: StepPlan, commit: Commit) -> None:
        lines.extend(planlog.records(plan, commit, cost))

    run.drive(watch=watch)
    head = planlog.header(cost, ranks=setup.ranks, policy=setup.policy, page_size=setup.page_size)
    return run, json.loads(json.dumps(head)), json.loads(json.dumps(lines))


class Reader:
    """Follows the rows through the log, by the convention of design section 7."""

    def __init__(self, prompt_lens: dict[int, int]) -> None:
        self.prompt_lens = prompt_lens
        self.output_lens: Counter[int] = Counter()
        self.computed: Counter[int] = Counter()
        self.done: dict[int, int] = {}  # tokens with KV, of the rows that run
        self.where: dict[int, int] = {}
        self.decoding: set[int] = set()
        self.finished: list[int] = []
        self.preempted: Counter[int] = Counter()
        self.admits: dict[int, list[int]] = defaultdict(list)

    def follow(self, line: Line) -> list[int]:
        """Takes one line in; gives the contexts of the rows that decode."""
        mine = lambda name: [row for row, *_ in line[name]]
        for row in mine("preempt"):
            assert self.where.pop(row) == line["rank"]
            self.decoding.discard(row)
            del self.done[row]
            self.preempted[row] += 1
        idle = mine("idle")
        decode = [
            r for r in sorted(self.decoding) if self.where[r] == line["rank"] and r not in idle
        ]
        for row in decode:
            self.done[row] += 1
            self.output_lens[row] += 1
        contexts = [self.done[row] for row in decode]
        for row, sample, cached in line["admit"]:
            assert sample == 0 and row not in self.where and row not in self.finished
            self.where[row], self.done[row] = line["rank"], cached
            self.admits[row].append(cached)
        for row, _, start, length in line["prefill"]:
            assert self.where[row] == line["rank"] and self.done[row] == start and length > 0
            self.done[row] += length
            self.computed[row] += length
            if self.done[row] == self.prompt_lens[row] + self.output_lens[row]:
                self.output_lens[row] += 1
                self.decoding.add(row)
        for row in mine("finish"):
            assert self.where.pop(row) == line["rank"] and row in self.decoding
            self.decoding.discard(row)
            self.finished.append(row)
        return contexts


def time_of(
    head: Line, parts: list[tuple[Line, list[int], int]]
) -> list[tuple[float, float, float]]:
    """Compute, memory and step seconds of each rank, from the header's constants."""
    c, tp, times = head["constants"], head["tp"], []
    for line, contexts, strays in parts:
        chunks = [(start, length) for *_, start, length in line["prefill"]]
        n = len(contexts) + strays + sum(length for _, length in chunks)
        pairs = sum(c * s + c * (c + 1) / 2 for s, c in chunks)
        attention = 4 * c["H_q"] * c["head_dim"] * c["L"] * pairs / tp
        compute = (2 * c["P_active"] * n / tp + attention) / (c["F"] * c["eff_c"])
        link = 2 * c["L"] * 2 * (tp - 1) / tp * n * c["hidden"] * 2 / c["link"]
        memory = c["kv"] * sum(contexts) / (c["BW"] * c["eff_m"])
        times.append((compute, memory, max(compute, c["W"] / c["BW"]) + memory + link))
    return times


def check(run: Run, head: Line, lines: list[Line]) -> None:
    reader = Reader({r.index: len(r.prompt_T) for r in run.requests})
    assert [(x["step"], x["rank"]) for x in lines] == [
        (step, rank) for step in range(len(run.steps)) for rank in range(run.setup.ranks)
    ]
    for step in range(len(run.steps)):
        parts = lines[step * run.setup.ranks : (step + 1) * run.setup.ranks]
        followed = [(line, reader.follow(line), line["stray"]) for line in parts]
        if not any(line["stray"] for line in parts):  # a stray's context is the reader's guess
            times = time_of(head, followed)
            slowest = max(total for *_, total in times)
            for (line, *_), (compute, memory, _) in zip(followed, times, strict=True):
                want = line["compute_s"], line["memory_s"], line["time_s"]
                assert (compute, memory, slowest) == pytest.approx(want, rel=1e-12, abs=0)

    index = [r.index for r in run.requests]
    assert sorted(reader.finished) == sorted(index), "a row is lost or ends twice"
    outputs = {index[row]: len(tokens) for row, (tokens, _) in run.answers.items()}
    assert dict(reader.output_lens) == outputs
    for row in index:
        assert len(reader.admits[row]) == 1 + reader.preempted[row]
        if not reader.preempted[row]:
            assert reader.admits[row][0] + reader.computed[row] == reader.prompt_lens[row]
    assert not reader.where


def make_rows(prompts: list[list[int]], stop_ids: set[int]) -> list[Request]:
    """`index` counts the lines of the file: every third one is an error row."""
    return [
        make_request(i + i // 2, prompt, max_new=1 + i % 9, stop_ids=stop_ids)
        for i, prompt in enumerate(prompts)
    ]


@settings(max_examples=120, deadline=None)
@given(
    prompts(),
    st.sampled_from([set[int](), {1, 2, 3}]),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(1, 3),
)
def test_the_log_alone_tells_what_ran(
    prompts: list[list[int]], stop_ids: set[int], ranks: int, spare_pages: int, tp: int
) -> None:
    setup = Setup(ranks=ranks, spare_pages=spare_pages, page_size=2, step_tokens=9)
    check(*logged(make_rows(prompts, stop_ids), setup, tp))


def test_preempted_rows_in_the_log() -> None:
    rows = [make_request(i, [i, 1, 2], max_new=12, stop_ids={1}) for i in range(10)]
    run, head, lines = logged(rows, Setup(spare_pages=2, page_size=2, ranks=2))
    assert sum(len(line["preempt"]) for line in lines) > 0
    assert sum(line["stray"] for line in lines) > 0
    check(run, head, lines)


def test_a_row_that_ended_in_flight_is_not_preempted() -> None:
    """Every row's second token ends it while the plan that preempts the youngest is launched."""
    stops = set(range(10))
    rows = [make_request(i, [i, i, i], max_new=9, min_tokens=1, stop_ids=stops) for i in range(4)]
    run, head, lines = logged(rows, Setup(spare_pages=2, page_size=2, slots=4))
    assert run.batcher.preemptions > sum(len(line["preempt"]) for line in lines)
    check(run, head, lines)


def test_header_names_what_the_times_are_made_of() -> None:
    _, head, _ = logged([make_request(0, [1, 2])], Setup(), tp=2)
    named = {k: head[k] for k in ("version", "model", "hardware", "tp", "dp", "overlap", "policy")}
    assert named == {
        "version": 1,
        "model": "tiny",
        "hardware": "v5e",
        "tp": 2,
        "dp": 1,
        "overlap": "serial",
        "policy": "dfs",
    }
    assert head["constants"]["F"] == 197e12 and head["constants"]["BW"] == 819e9
