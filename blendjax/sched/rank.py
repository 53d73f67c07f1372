"""Continuous batching on one data rank: its slots, its pages, and its part of each step."""

from __future__ import annotations

import numpy as np

from blendjax.sched.pages import PagePool
from blendjax.sched.plan import Chunk, PageCopy, RankPlan, Sequence
from blendjax.sched.prefix import Hit, PrefixCache
from blendjax.sched.scan import RankView


class Rank:
    """The rows that run on one data rank, their slots and their pages."""

    def __init__(
        self,
        rank: int,
        *,
        pool: PagePool,
        cache: PrefixCache | None,
        page_size: int,
        slots: int,
        pages_per_seq: int,
    ) -> None:
        self.rank, self.pool, self.cache, self.page_size = rank, pool, cache, page_size
        self.running: list[Sequence] = []  # oldest first
        self.table = np.zeros((slots, pages_per_seq), np.int32)  # [slots, pages a sequence]
        self._num_pages = [0] * slots
        self._free_slots = list(range(slots - 1, -1, -1))
        self._pinned: list[int] = []  # sources of this step's page copies

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def used_pages(self) -> int:
        return self.pool.capacity - self.pool.free

    def begin_step(self) -> None:
        """Rows that were given their last token leave before the next step is planned: the steps
        run in order, so their pages and slots can be written by it."""
        while self._pinned:
            self.pool.drop(self._pinned.pop())
        for seq in [s for s in self.running if s.drained]:
            self.release(seq)

    def release(self, seq: Sequence) -> None:
        """Give back slot and pages; once, however often it is asked."""
        if seq.slot < 0:
            return
        for page in self.table[seq.slot, : self._num_pages[seq.slot]].tolist():
            self.pool.drop(page)
        self.table[seq.slot] = 0
        self._num_pages[seq.slot] = 0
        self._free_slots.append(seq.slot)
        seq.leave()
        self.running.remove(seq)

    def plan_decodes(self, plan: RankPlan) -> None:
        """Every row past its prefill draws one token; rows that cannot get a page preempt the
        youngest."""
        for seq in list(self.running):
            if seq.slot < 0 or seq.prefilling:
                continue
            if self._room_for_next(seq, plan):
                plan.decodes.append(seq)
        plan.decodes = [seq for seq in plan.decodes if seq.slot >= 0]
        plan.decodes.sort(key=lambda seq: -seq.computed)
        plan.contexts = np.array([seq.computed + 1 for seq in plan.decodes], np.int32)
        for seq in plan.decodes:
            seq.computed += 1
            seq.planned += 1

    def _room_for_next(self, seq: Sequence, plan: RankPlan) -> bool:
        if seq.computed < self._num_pages[seq.slot] * self.page_size:
            return True
        while not self._make_free(1):  # alone, a row always finds room: the whole pool holds it
            victim = max(self.running, key=lambda s: s.arrival)
            self._preempt(victim, plan)
            if victim is seq:
                return False
        self._add_page(seq, self.pool.take())
        return True

    def _preempt(self, seq: Sequence, plan: RankPlan) -> None:
        """Preemption is by recompute: its pages go, its tokens stay."""
        plan.preempts.append(seq)
        if self.cache is not None and not seq.prefilling:
            self.cache.expect(seq.row)
        self.release(seq)

    def _make_free(self, pages: int) -> bool:
        if self.pool.free >= pages:
            return True
        return self.cache is not None and self.cache.evict(pages)

    def _add_page(self, seq: Sequence, page: int) -> None:
        self.table[seq.slot, self._num_pages[seq.slot]] = page
        self._num_pages[seq.slot] += 1

    def view(self, plan: RankPlan, free_tokens: int, *, may_steal: bool) -> RankView:
        return RankView(
            rank=self.rank,
            decode_rows=len(plan.decodes),
            free_tokens=free_tokens,
            free_pages=self.pool.free,
            running=len(self.running),
            may_steal=may_steal,
        )

    def continue_prefills(self, plan: RankPlan, tokens: int) -> int:
        """Rows in mid-prompt go on first; gives the tokens left."""
        for seq in self.running:
            if seq.prefilling and tokens:
                tokens -= self._chunk(seq, plan, tokens)
        return tokens

    def _chunk(self, seq: Sequence, plan: RankPlan, tokens: int) -> int:
        length = min(tokens, seq.prefill_len - seq.computed)
        plan.chunks.append(Chunk(seq, seq.computed, length))
        seq.computed += length
        if not seq.prefilling:
            seq.planned += 1
        if self.cache is not None:
            row, prompt = seq.row, len(seq.request.prompt_T)
            pages = self.table[seq.slot, : self._num_pages[seq.slot]]
            self.cache.publish(row, min(seq.computed, prompt), pages)
            if not seq.prefilling:
                self.cache.settle(row)
        return length

    def admit(self, seq: Sequence, plan: RankPlan, tokens: int) -> int | None:
        """Start the row with a first chunk, its whole prompt's pages in hand; gives the tokens
        left, or None if there is no room for it now."""
        seq.prefill_len = len(seq.request.prompt_T) + len(seq.generated)
        hit = self._reserve(seq)
        if hit is None:
            return None
        seq.start(self._free_slots.pop(), hit.tokens)
        self.running.append(seq)
        for page in hit.pages:
            self._add_page(seq, page)
        for _ in range(self._lacking(seq, hit)):
            self._add_page(seq, self.pool.take())
        plan.admits.append((seq, hit.tokens))
        if hit.copy_from is not None:
            target = int(self.table[seq.slot, len(hit.pages)])
            plan.copies.append(PageCopy(hit.copy_from, target, hit.tokens % self.page_size))
            self._pinned.append(hit.copy_from)
        return tokens - self._chunk(seq, plan, tokens)

    def _lacking(self, seq: Sequence, hit: Hit) -> int:
        """Pages of its own that the row needs for its prefill."""
        return -(-seq.prefill_len // self.page_size) - len(hit.pages)

    def _growing(self) -> int:
        """Running rows that will take another page: each is left one, or it preempts at once."""
        room = lambda seq: self._num_pages[seq.slot] * self.page_size
        need = lambda seq: len(seq.request.prompt_T) + seq.request.max_new - 1
        return sum(room(seq) < need(seq) for seq in self.running)

    def _reserve(self, seq: Sequence) -> Hit | None:
        """A held hit, and as many free pages as the row lacks; or None, and nothing held."""
        hit = self._find(seq)
        if self._make_free(self._lacking(seq, hit) + self._growing()):
            return hit
        if hit.copy_from is not None and not self.running:
            # Alone it must fit: rather compute a few tokens than keep the source of the copy.
            self.pool.drop(hit.copy_from)
            hit = Hit(hit.tokens - hit.tokens % self.page_size, hit.pages, None)
            if self._make_free(self._lacking(seq, hit)):
                return hit
        self._unhold(hit)
        return None

    def _find(self, seq: Sequence) -> Hit:
        """A hit whose pages are already held, so that nothing takes them: the full ones for the
        row, the source of the copy until this step is launched (later rows of the step write
        first)."""
        if self.cache is None:
            return Hit(0, [], None)
        hit = self.cache.find(seq.row, seq.prefill_len - 1)
        for page in hit.all_pages:
            self.pool.share(page)
        return hit

    def _unhold(self, hit: Hit) -> None:
        for page in hit.all_pages:
            self.pool.drop(page)

    def check(self) -> None:
        """References equal what sequences and the prefix cache hold."""
        held = list(self.cache.held) if self.cache is not None else []
        held += self._pinned
        for seq in self.running:
            held += self.table[seq.slot, : self._num_pages[seq.slot]].tolist()
        self.pool.check(held)
