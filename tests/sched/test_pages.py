"""The page pool against a plain dictionary of counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendjax.sched.pages import PagePool

OPS = st.lists(
    st.tuples(st.sampled_from(["take", "share", "drop"]), st.integers(0, 99)), max_size=60
)


@given(st.integers(2, 9), OPS)
def test_no_page_is_lost_or_given_twice(num_pages: int, ops: list[tuple[str, int]]) -> None:
    pool, counts = PagePool(num_pages), dict[int, int]()
    for op, pick in ops:
        if op == "take" and pool.free:
            page = pool.take()
            assert 0 < page < num_pages and page not in counts, "a live page or scratch handed out"
            counts[page] = 1
        elif op != "take" and counts:
            page = sorted(counts)[pick % len(counts)]
            pool.share(page) if op == "share" else pool.drop(page)
            counts[page] += 1 if op == "share" else -1
            counts = {p: n for p, n in counts.items() if n}
        assert pool.free + len(counts) == pool.capacity == num_pages - 1
        assert [pool.refs(p) for p in range(num_pages)] == [
            counts.get(p, 0) for p in range(num_pages)
        ]
        pool.check([page for page, n in counts.items() for _ in range(n)])


def test_pages_rise_so_that_runs_repeat() -> None:
    pool = PagePool(4)
    assert [pool.take() for _ in range(3)] == [1, 2, 3]
    pool.drop(2)
    assert pool.take() == 2


def test_misuse_is_an_error_not_a_wrong_count() -> None:
    pool = PagePool(3)
    page = pool.take()
    pool.drop(page)
    for misuse in (pool.drop, pool.share):
        with pytest.raises(ValueError, match=f"page {page} is"):
            misuse(page)
    with pytest.raises(ValueError, match="page 0"):
        pool.share(0)
    pool.check([])


@pytest.mark.parametrize("holders", [[], [1, 1], [2], [1, 0]])
def test_check_sees_every_false_count(holders: list[int]) -> None:
    pool = PagePool(3)
    assert pool.take() == 1
    pool.check([1])
    with pytest.raises(AssertionError):
        pool.check(holders)
