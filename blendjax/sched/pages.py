"""KV pages of one data rank: reference counts over a fixed pool; page 0 is scratch, never handed
out."""

from __future__ import annotations


class PagePool:
    """`num_pages` pages, page 0 included; a page is free when nobody holds a reference."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # lowest number first, so runs repeat
        self._refs = [0] * num_pages

    @property
    def capacity(self) -> int:
        return self.num_pages - 1

    @property
    def free(self) -> int:
        return len(self._free)

    def refs(self, page: int) -> int:
        return self._refs[page]

    def take(self) -> int:
        """A free page with one reference. The caller has asked `free` first."""
        page = self._free.pop()
        self._refs[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder of a page that is held."""
        if not self._refs[page]:
            raise ValueError(f"page {page} is free and can't be shared")
        self._refs[page] += 1

    def drop(self, page: int) -> None:
        """One holder less; the last one frees the page."""
        if not self._refs[page]:
            raise ValueError(f"page {page} is dropped more often than it is held")
        self._refs[page] -= 1
        if not self._refs[page]:
            self._free.append(page)

    def check(self, holders: list[int]) -> None:
        """Counts equal the references named by `holders` (a page once for each); nothing is
        lost."""
        held = [0] * self.num_pages
        for page in holders:
            held[page] += 1
        assert held[0] == 0, "the scratch page has a holder"
        assert held == self._refs, "reference counts differ from the holders"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert free == {p for p in range(1, self.num_pages) if not held[p]}, "a page is lost"
