"""The prefix cache under random rows, with the content of every page written down."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from harness import prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from blendjax.sched.pages import PagePool
from blendjax.sched.prefix import PrefixCache
from blendjax.sched.tree import build_tree

Prompt = list[int]


@dataclasses.dataclass
class Row:
    done: int
    pages: list[int]
    settled: bool = False


class World:
    """Rows that run as on a rank. `content[page][i]`: the prefix that the slot stands for."""

    def __init__(self, prompts: list[Prompt], page_size: int, num_pages: int = 400) -> None:
        self.prompts, self.size = prompts, page_size
        tree = build_tree([np.array(p, np.int32) for p in prompts])
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(tree, self.pool, page_size, np.arange(len(prompts)))
        self.content: list[list[tuple[int, ...] | None]] = [
            [None] * page_size for _ in range(num_pages)
        ]
        self.waiting = list(range(len(prompts)))
        self.running: dict[int, Row] = {}
        self.hits: dict[int, int] = {}
        self.known: set[tuple[int, ...]] = set()  # all prefixes ever computed
        for row in self.waiting:
            self.cache.expect(row)

    def admit(self, row: int) -> None:
        prompt = self.prompts[row]
        hit = self.cache.find(row, len(prompt) - 1)
        assert hit.tokens <= min(len(prompt) - 1, self.common(row)), "more than any row computed"
        assert len(hit.pages) == hit.tokens // self.size
        assert (hit.copy_from is not None) == bool(hit.tokens % self.size)
        for page in hit.pages:
            self.pool.share(page)
        own = [self.pool.take() for _ in range(-(-len(prompt) // self.size) - len(hit.pages))]
        for page in own:  # what an earlier owner left must not be read
            self.content[page] = [None] * self.size
        if hit.copy_from is not None:
            part = hit.tokens % self.size
            self.content[own[0]][:part] = self.content[hit.copy_from][:part]
        self.waiting.remove(row)
        self.running[row] = Row(hit.tokens, hit.pages + own)
        self.hits[row] = hit.tokens
        self.check_row(row)

    def common(self, row: int) -> int:
        prefixes = (tuple(self.prompts[row][: i + 1]) for i in range(len(self.prompts[row])))
        return sum(prefix in self.known for prefix in prefixes)

    def prefill(self, row: int, tokens: int) -> None:
        run, prompt = self.running[row], self.prompts[row]
        for at in range(run.done, min(run.done + tokens, len(prompt))):
            page, prefix = run.pages[at // self.size], tuple(prompt[: at + 1])
            assert self.content[page][at % self.size] is None, "a shared slot is written"
            self.content[page][at % self.size] = prefix
            self.known.add(prefix)
            run.done = at + 1
        self.cache.publish(row, run.done, np.array(run.pages))
        if run.done == len(prompt) and not run.settled:
            self.cache.settle(row)
            run.settled = True

    def leave(self, row: int) -> None:
        """Ended, or preempted in mid-prefill or later: then it waits again."""
        run = self.running.pop(row)
        for page in run.pages:
            self.pool.drop(page)

    def preempt(self, row: int) -> None:
        if self.running[row].settled:
            self.cache.expect(row)
        self.leave(row)
        self.waiting.append(row)

    def check_row(self, row: int) -> None:
        run, prompt = self.running[row], self.prompts[row]
        for at in range(run.done):
            seen = self.content[run.pages[at // self.size]][at % self.size]
            assert seen == tuple(prompt[: at + 1]), "the row would read another prefix"

    def check(self) -> None:
        self.pool.check(self.cache.held + [p for run in self.running.values() for p in run.pages])
        for row in self.running:
            self.check_row(row)


OPS = st.lists(
    st.tuples(st.sampled_from("aaapppppepv"), st.integers(0, 99), st.integers(1, 9)), max_size=60
)


def finish(world: World) -> None:
    while world.waiting or world.running:
        if not world.running:
            world.admit(world.waiting[0])
        for row in list(world.running):
            world.prefill(row, 99)
            world.leave(row)
        world.check()


@settings(max_examples=250, deadline=None)
@given(prompts(), st.sampled_from([1, 2, 4, 16]), OPS)
def test_a_row_reads_only_its_own_prefix(
    prompts: list[Prompt], page_size: int, ops: list[tuple[str, int, int]]
) -> None:
    world = World(prompts, page_size)
    for op, pick, count in ops:
        rows = world.waiting if op == "a" else list(world.running)
        row = rows[pick % len(rows)] if rows else None
        if op == "v":
            evict_and_check(world, world.pool.free + count)
        elif row is None:
            continue
        elif op == "a":
            world.admit(row)
        elif op == "p":
            world.prefill(row, count)
        elif world.running[row].settled and pick % 2:
            world.leave(row)
        else:
            world.preempt(row)
        world.check()
    finish(world)
    assert not world.cache.held and not any(world.cache.waiting)
    assert world.pool.free == world.pool.capacity


def evict_and_check(world: World, pages: int) -> None:
    in_use = {page for run in world.running.values() for page in run.pages}
    idle = set(world.cache.held) - in_use
    held, free = sorted(world.cache.held), world.pool.free
    if world.cache.evict(pages):
        assert free < pages <= world.pool.free
    else:
        assert free + len(idle) < pages, "pages that nobody reads were not given"
        assert sorted(world.cache.held) == held, "forgotten in vain"


@settings(max_examples=150, deadline=None)
@given(prompts(12), st.sampled_from([1, 2, 4, 16]), OPS)
def test_without_eviction_everything_computed_is_found(
    prompts: list[Prompt], page_size: int, ops: list[tuple[str, int, int]]
) -> None:
    world = World(prompts, page_size)
    for op, pick, count in ops:
        rows = world.waiting if op == "a" else list(world.running)
        row = rows[pick % len(rows)] if rows else None
        if row is None:
            continue
        if op == "a":
            best = min(world.common(row), len(prompts[row]) - 1)
            world.admit(row)
            assert world.hits[row] == best
        else:
            world.prefill(row, count)
            if op == "e" and world.running[row].settled:
                world.leave(row)
    finish(world)


def shared_by_two(first: Prompt, second: Prompt) -> list[Prompt]:
    return [[*prefix, tail] for prefix in (first, second) for tail in (7, 8)]


def test_the_furthest_next_use_is_evicted_first() -> None:
    world = World(shared_by_two([1] * 4, [2] * 4), 4)
    for row in (0, 2):
        world.admit(row)
        world.prefill(row, 9)
        world.leave(row)
    assert world.cache.evict(world.pool.free + 1)
    world.admit(1)
    world.admit(3)
    assert (world.hits[1], world.hits[3]) == (4, 0)


def test_nodes_are_forgotten_with_the_last_row_that_waits() -> None:
    world = World(shared_by_two([1] * 5, [2] * 5), 4)
    world.admit(0)
    world.prefill(0, 3)
    assert len(world.cache.held) == 1
    world.prefill(0, 9)
    world.leave(0)
    assert len(world.cache.held) == 2, "the half-filled page too"
    world.admit(1)
    world.prefill(1, 9)
    assert not world.cache.held


@pytest.mark.parametrize("shared", [3, 4, 5, 7, 8, 9])
def test_hits_around_a_page_border(shared: int) -> None:
    world = World([[1] * shared + [2], [1] * shared + [3], [1] * shared], 4)
    world.admit(0)
    world.prefill(0, 99)
    for row, tokens in ((1, shared), (2, shared - 1)):
        hit = world.cache.find(row, len(world.prompts[row]) - 1)
        assert hit.tokens == tokens, "the last prompt token is always computed"
        assert hit.pages == world.running[0].pages[: tokens // 4]
        source = world.running[0].pages[tokens // 4] if tokens % 4 else None
        assert hit.copy_from == source


def test_a_page_across_two_nodes_is_evicted_with_both() -> None:
    world = World([[0, 0, 1, 5], [0, 0, 1, 6], [0, 0, 2]], 4)
    world.admit(0)
    world.prefill(0, 9)
    world.leave(0)
    assert sorted(world.cache.held) == [1, 1]
    assert world.cache.evict(world.pool.capacity)
    assert not world.cache.held
