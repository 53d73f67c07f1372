"""The prefix tree of all prompts (paper section 4), as arrays: no object per token or node.

root 0 ──[system prompt]── 1 ──[shot A]── 2      rows hang where their prompt ends;
                             └─[shot B]── 3      equal prompts hang under one node
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixTree:
    """Radix tree; node 0 is the root, a parent's number is below its children's.

    A node's tokens are those from `end[parent]` to `end[node]` of any prompt below it.
    """

    parent: np.ndarray  # int32 [nodes]; the root is its own parent
    end: np.ndarray  # int32 [nodes]: depth in tokens
    leaf: np.ndarray  # int32 [rows]: the node where a row's prompt ends
    order: np.ndarray  # int32 [rows]: rows depth first
    first: np.ndarray  # int32 [nodes]: the rows below a node are order[first:last]
    last: np.ndarray

    @property
    def distinct_tokens(self) -> int:
        """Prompt tokens to compute when every shared prefix is computed once."""
        return int((self.end - self.end[self.parent]).sum())

    @property
    def distinct_pairs(self) -> float:
        """Query-key pairs of causal attention among the distinct tokens."""
        start, end = self.end[self.parent].astype(np.float64), self.end.astype(np.float64)
        return float((end * (end + 1) - start * (start + 1)).sum() / 2)

    def path(self, row: int) -> list[int]:
        """Nodes from below the root to the row's own."""
        nodes, node = [], int(self.leaf[row])
        while node:
            nodes.append(node)
            node = int(self.parent[node])
        return nodes[::-1]


def build_tree(prompts: Sequence[np.ndarray]) -> PrefixTree:
    """Tree of int32 prompts, linear in total tokens but for one sort. Children rise by token id."""
    keys = [p.astype(">i4").tobytes() for p in prompts]  # memcmp order = token order
    order = sorted(range(len(prompts)), key=keys.__getitem__)
    parent, end, open_first, last = [0], [0], [0], [len(order)]
    leaf = np.zeros(len(prompts), np.int32)
    stack = [0]
    for place, row in enumerate(order):
        shared = _common(prompts[order[place - 1]], prompts[row]) if place else 0
        closed = -1
        while end[stack[-1]] > shared:
            closed = stack.pop()
            last[closed] = place
        if end[stack[-1]] < shared:  # the last closed node forks inside its tokens
            parent.append(stack[-1])
            end.append(shared)
            open_first.append(open_first[closed])
            last.append(len(order))
            parent[closed] = len(parent) - 1
            stack.append(len(parent) - 1)
        if end[stack[-1]] < len(prompts[row]):
            parent.append(stack[-1])
            end.append(len(prompts[row]))
            open_first.append(place)
            last.append(len(order))
            stack.append(len(parent) - 1)
        leaf[row] = stack[-1]
    return _renumber(parent, end, leaf, order, open_first, last)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    at = int(differ.argmax()) if n else 0
    return at if n and differ[at] else n


def _renumber(
    parent: list[int],
    end: list[int],
    leaf: np.ndarray,
    order: list[int],
    first: list[int],
    last: list[int],
) -> PrefixTree:
    """Number nodes by depth in tokens, so that parents come before children."""
    by_depth = np.argsort(np.asarray(end), kind="stable")
    new = np.empty(len(end), np.int32)
    new[by_depth] = np.arange(len(end), dtype=np.int32)
    ints = lambda a: np.asarray(a, np.int32)
    return PrefixTree(
        parent=new[ints(parent)][by_depth],
        end=ints(end)[by_depth],
        leaf=new[leaf],
        order=ints(order),
        first=ints(first)[by_depth],
        last=ints(last)[by_depth],
    )
