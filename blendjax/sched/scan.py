"""Policies: in which order rows are admitted on each data rank, and how much prefill a step takes.

The batcher asks, the policy answers from what it is shown: it never sees an output length before
the row has ended. Every policy gives the same text; only time differs.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from blendjax.sched.tree import PrefixTree


class RankView(NamedTuple):
    """What a policy sees of a data rank while a step is planned."""

    rank: int
    decode_rows: int
    free_tokens: int  # of the step, after decode rows
    free_pages: int
    running: int
    may_steal: bool  # every rank has admitted what it could of its own rows


class Policy(Protocol):
    """Decides admissions. Deterministic: no clock, no hash order."""

    @property
    def turn(self) -> np.ndarray:
        """[rows] the place of each row in the planned order: what eviction looks ahead by."""
        ...

    def budget(self, view: RankView) -> int:
        """Prefill tokens the rank should compute in this step, at most `view.free_tokens`."""
        ...

    def peek(self, view: RankView) -> int | None:
        """The row the rank would admit next, or None to admit nothing now."""
        ...

    def take(self, view: RankView) -> None:
        """The row that `peek` named has been admitted."""
        ...

    def put_back(self, rank: int, row: int) -> None:
        """A preempted row waits again, ahead of the others."""
        ...

    def home(self, row: int) -> int:
        """The rank that is expected to run the row."""
        ...

    def observe(self, row: int, output_len: int) -> None:
        """The row has ended after `output_len` tokens."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyInput:
    """All that a policy may know: the tree, prompt lengths, and how many ranks there are."""

    tree: PrefixTree
    prompt_lens: np.ndarray  # int64 [rows]
    ranks: int


class OrderedPolicy:
    """Rows in a fixed order, cut into one stretch a rank; a rank that runs dry takes the last row
    of the fullest queue. The whole free part of a step goes to prefill."""

    def __init__(self, order: Sequence[int], source: PolicyInput) -> None:
        self._turn = np.empty(len(order), np.int64)
        self._turn[np.asarray(order, np.int64)] = np.arange(len(order))
        self._queues = [deque(part) for part in _cut(order, source)]
        self._home = np.zeros(len(order), np.int32)
        for rank, queue in enumerate(self._queues):
            self._home[list(queue)] = rank

    @property
    def turn(self) -> np.ndarray:
        return self._turn

    def budget(self, view: RankView) -> int:
        return view.free_tokens

    def peek(self, view: RankView) -> int | None:
        queue = self._queues[view.rank]
        if queue or not view.may_steal:
            return queue[0] if queue else None
        fullest = self._fullest()
        return fullest[-1] if fullest else None

    def take(self, view: RankView) -> None:
        queue = self._queues[view.rank]
        if queue:
            queue.popleft()
        else:
            self._fullest().pop()

    def _fullest(self) -> deque[int]:
        return max(self._queues, key=len)

    def put_back(self, rank: int, row: int) -> None:
        self._queues[rank].appendleft(row)

    def home(self, row: int) -> int:
        return int(self._home[row])

    def observe(self, row: int, output_len: int) -> None:
        """A fixed order learns nothing."""


def _cut(order: Sequence[int], source: PolicyInput) -> list[list[int]]:
    """Stretches of about equal prompt tokens."""
    if not len(order):
        return [[] for _ in range(source.ranks)]
    tokens = np.cumsum(source.prompt_lens[np.asarray(order)])
    middle = tokens - source.prompt_lens[np.asarray(order)] / 2
    rank = np.minimum(middle * source.ranks // tokens[-1], source.ranks - 1).astype(int)
    return [
        [row for row, r in zip(order, rank, strict=True) if r == i] for i in range(source.ranks)
    ]


def fcfs(source: PolicyInput) -> Policy:
    """First come, first served."""
    return OrderedPolicy(range(len(source.prompt_lens)), source)


def dfs(source: PolicyInput) -> Policy:
    """Depth first over the prefix tree: neighbours share the longest prefixes."""
    return OrderedPolicy(source.tree.order.tolist(), source)


POLICIES: dict[str, Callable[[PolicyInput], Policy]] = {"dfs": dfs, "fcfs": fcfs}
