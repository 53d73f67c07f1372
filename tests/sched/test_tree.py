"""The prefix tree against sets of prefixes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendjax.sched.tree import PrefixTree, build_tree

Prompt = list[int]
TOKEN = st.sampled_from([0, 1, 2, 255, 256, 65_536, 2**31 - 1])  # order of bytes is not of numbers
FLAT = st.lists(st.lists(TOKEN, min_size=1, max_size=8), max_size=12)


@st.composite
def families(draw: st.DrawFn) -> list[Prompt]:
    """Prompts of which many begin like another one, or are one."""
    made: list[Prompt] = []
    for own in draw(FLAT):
        shared = draw(st.sampled_from([[], *made]))
        cut = shared[: draw(st.integers(0, len(shared)))]
        made.append(cut + own[draw(st.integers(0, len(own))) :] or own)
    return made


def build(prompts: list[Prompt]) -> PrefixTree:
    return build_tree([np.array(p, np.int32) for p in prompts])


def node_prefix(tree: PrefixTree, prompts: list[Prompt], node: int) -> Prompt:
    row = int(tree.order[tree.first[node]])
    return prompts[row][: int(tree.end[node])]


def check(prompts: list[Prompt]) -> None:
    tree = build(prompts)
    prefixes = {tuple(p[:i]) for p in prompts for i in range(1, len(p) + 1)}
    assert tree.distinct_tokens == len(prefixes)
    assert tree.order.tolist() == sorted(range(len(prompts)), key=prompts.__getitem__)

    # A node is where a prompt ends or two part.
    branches = {p for p in prefixes if len({q for q in prefixes if q[:-1] == p}) > 1}
    wanted = branches | {tuple(p) for p in prompts}
    made = [tuple(node_prefix(tree, prompts, node)) for node in range(1, len(tree.end))]
    assert len(made) == len(wanted) and set(made) == wanted

    for row, prompt in enumerate(prompts):
        path = tree.path(row)
        assert path[-1] == tree.leaf[row]
        assert [node_prefix(tree, prompts, node) for node in path] == [
            prompt[: i + 1] for i in range(len(prompt)) if tuple(prompt[: i + 1]) in wanted
        ]
        assert [int(tree.parent[node]) for node in path] == [0, *path[:-1]]

    assert tree.parent[0] == tree.end[0] == 0
    assert all(tree.parent[node] < node for node in range(1, len(tree.end)))
    for node in range(len(tree.end)):
        prefix = node_prefix(tree, prompts, node) if node else []
        below = tree.order[tree.first[node] : tree.last[node]]
        assert set(below.tolist()) == {
            row for row, p in enumerate(prompts) if p[: len(prefix)] == prefix
        }


@given(families())
def test_tree_equals_the_naive_trie(prompts: list[Prompt]) -> None:
    check(prompts)


@pytest.mark.parametrize(
    "prompts",
    [
        pytest.param([], id="no rows"),
        pytest.param([[5]], id="one row of one token"),
        pytest.param([[1, 2, 3]] * 4, id="duplicates"),
        pytest.param([[1, 2, 3], [1, 2], [1], [1, 2]], id="prompts that begin others"),
        pytest.param([[1, 2], [1, 3], [1, 3, 4], [2]], id="fork inside a node"),
        pytest.param([[1, 1, 1, 9], [1, 1, 9], [1, 9], [9]], id="comb"),
        pytest.param([[256], [1], [65_536, 1]], id="order by number, not by byte"),
    ],
)
def test_shapes(prompts: list[Prompt]) -> None:
    check(prompts)


def test_deep_and_wide_trees_need_no_recursion_and_few_nodes() -> None:
    nested = build([[7] * n for n in range(1, 2001)])
    assert len(nested.end) == 2001 and nested.distinct_tokens == 2000
    assert nested.path(1999) == list(range(1, 2001))
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 50_000, 200).tolist()
    wide = build([[*shared, *rng.integers(0, 50_000, 5).tolist()] for _ in range(3000)])
    assert len(wide.end) <= 2 * 3000 + 1
    assert wide.distinct_tokens < 200 + 3000 * 5 + 1
