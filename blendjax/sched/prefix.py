"""Which tree nodes have their KV on a data rank, and in which pages.

A node holds one reference on every page that covers its tokens, from the first row that computed
them, as long as rows that wait may still use it. Positions only ever get appended to a page, so the
page in which a node ends stays a valid source after its owner has gone on writing behind that
point: full pages are shared, the shared part of the last one is copied into the new row's page.

    tokens    0 . . . | . . . . | . .     page size 4, node A = tokens 0-5, rows B and C below it
    B's       [ p1    ] [ p2   ] [ p3     C shares p1 and copies 2 tokens of p2 into its own page
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from blendjax.sched.pages import PagePool
from blendjax.sched.tree import PrefixTree


class Hit(NamedTuple):
    """What a row finds: `tokens` of KV in shared full `pages`, and where to copy the rest from."""

    tokens: int
    pages: list[int]
    copy_from: int | None  # the page that holds the last `tokens % page_size` tokens

    @property
    def all_pages(self) -> list[int]:
        return self.pages if self.copy_from is None else [*self.pages, self.copy_from]


class PrefixCache:
    """Pages of tree nodes on one rank. `waiting[node]`: rows below it whose prefill is to come."""

    def __init__(self, tree: PrefixTree, pool: PagePool, page_size: int, turn: np.ndarray) -> None:
        self._tree, self._pool, self._page_size = tree, pool, page_size
        self._turn = turn  # [rows]: place in the policy's order, for "furthest next use"
        self._waits = np.zeros(len(tree.leaf), bool)
        self.waiting = [0] * len(tree.end)
        self._pages: dict[int, list[int]] = {}
        self._ready: dict[int, int] = {}  # depth in tokens up to which a node's KV is there
        self._end = tree.end.tolist()
        self._start = tree.end[tree.parent].tolist()

    @property
    def held(self) -> list[int]:
        """Every page reference of the cache."""
        return [page for pages in self._pages.values() for page in pages]

    def expect(self, row: int) -> None:
        """The row's prefill is to come on this rank."""
        self._waits[row] = True
        for node in self._tree.path(row):
            self.waiting[node] += 1

    def settle(self, row: int) -> None:
        """The row's prompt is computed, or it went elsewhere: forget nodes nobody waits for."""
        self._waits[row] = False
        for node in self._tree.path(row):
            self.waiting[node] -= 1
            if not self.waiting[node]:
                self._forget(node)

    def find(self, row: int, limit: int) -> Hit:
        """The longest prefix of the row's prompt that is here, cut at `limit` tokens."""
        size, pages, tokens, copy_from = self._page_size, [], 0, None
        for node in self._tree.path(row):
            ready = min(self._ready.get(node, 0), limit)
            if ready <= tokens:
                break
            tokens, first = ready, self._start[node] // size
            mine = self._pages[node]
            pages += mine[len(pages) - first : ready // size - first]
            copy_from = mine[ready // size - first] if ready % size else None
            if ready < self._end[node]:
                break
        return Hit(tokens, pages, copy_from)

    def publish(self, row: int, done: int, pages: np.ndarray) -> None:
        """The row's first `done` prompt tokens are computed, in its `pages`: keep what others
        await."""
        for node in self._tree.path(row):
            start, end = self._start[node], self._end[node]
            if done <= start or self.waiting[node] < 2:  # the row itself is one
                return
            ready = min(done, end)
            if ready <= self._ready.get(node, 0):
                continue
            self._extend(node, ready, pages)

    def _extend(self, node: int, ready: int, pages: np.ndarray) -> None:
        size, first = self._page_size, self._start[node] // self._page_size
        mine = self._pages.setdefault(node, [])
        if mine and self._ready[node] % size:  # the row's copy of a half-filled page goes further
            self._pool.drop(mine.pop())
        for page in pages[first + len(mine) : -(-ready // size)].tolist():
            self._pool.share(page)
            mine.append(page)
        self._ready[node] = ready

    def evict(self, pages: int) -> bool:
        """Free pages until `pages` are free: of the nodes without cached children, the one whose
        next use is furthest goes first. False, and nothing forgotten, if not so many can be."""
        if self._pool.free + len(self._idle()) < pages:
            return False
        while self._pool.free < pages:
            idle = self._idle()
            inner = {int(self._tree.parent[node]) for node in self._pages}
            tips = [n for n in self._pages if n not in inner and self._is_over(idle, n)]
            self._forget(max(tips, key=lambda n: (self._frees(n), self._next_use(n), n)))
        return True

    def _idle(self) -> set[int]:
        """Pages that no running row holds: one may belong to two nodes, that it lies across."""
        counts = Counter(self.held)
        return {page for page, count in counts.items() if self._pool.refs(page) == count}

    def _is_over(self, idle: set[int], node: int) -> bool:
        """Whether the node or a node above it holds one of the `idle` pages."""
        while node:
            if not idle.isdisjoint(self._pages[node]):
                return True
            node = int(self._tree.parent[node])
        return False

    def _frees(self, node: int) -> bool:
        return any(self._pool.refs(page) == 1 for page in self._pages[node])

    def _next_use(self, node: int) -> int:
        rows = self._tree.order[self._tree.first[node] : self._tree.last[node]]
        turns = self._turn[rows][self._waits[rows]]
        return int(turns.min()) if len(turns) else int(np.iinfo(np.int64).max)

    def _forget(self, node: int) -> None:
        for page in self._pages.pop(node, ()):
            self._pool.drop(page)
        self._ready.pop(node, None)
