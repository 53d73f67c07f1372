"""From queue to step plan and from tokens back to finished rows, over all data ranks.

The batcher runs one step ahead of the tokens it gets back. It knows by itself when a row ends by
length; a row that ends by EOS or a stop string may ride one more step, whose token is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from blendjax.core import FinishReason, Request
from blendjax.packing import NO_TOKEN, Bucket
from blendjax.sched.pack import Packer
from blendjax.sched.pages import PagePool
from blendjax.sched.plan import BatcherConfig, Commit, Ended, RankPlan, Sequence, StepPlan
from blendjax.sched.prefix import PrefixCache
from blendjax.sched.rank import Rank
from blendjax.sched.scan import Policy
from blendjax.sched.tree import PrefixTree

StopCheck = Callable[[Sequence], bool]  # does the row's text now hold one of its stop strings?


class Batcher:
    """Holds all host state of a run: who runs where, who waits, which pages are whose."""

    def __init__(
        self,
        requests: list[Request],
        tree: PrefixTree,
        policy: Policy,
        config: BatcherConfig,
        *,
        stop_check: StopCheck,
    ) -> None:
        """`requests[i]` is row i of the tree and of the policy."""
        self._requests, self._policy, self._config = requests, policy, config
        self._stop_check = stop_check
        self.ranks = [self._make_rank(i, tree) for i in range(config.ranks)]
        self._home = [policy.home(row) for row in range(len(requests))]
        for row, home in enumerate(self._home):
            self._expect(row, home)
        self._packer = Packer(config.page_size, config.slots)
        self._suspended: dict[int, Sequence] = {}  # preempted, back in the queue
        self._leaving: list[Sequence] = []  # preempted by the last plan, its token still in flight
        self._unfinished = len(requests)
        self._arrivals = self._steps = 0
        self.preemptions = 0

    def _make_rank(self, rank: int, tree: PrefixTree) -> Rank:
        config = self._config
        pool = PagePool(config.num_pages)
        cache = PrefixCache(tree, pool, config.page_size, self._policy.turn)
        return Rank(
            rank,
            pool=pool,
            cache=cache if config.prefix_sharing else None,
            page_size=config.page_size,
            slots=config.slots,
            pages_per_seq=max(bucket.pages for bucket in config.ladder),
        )

    @property
    def unfinished(self) -> int:
        """Rows without their last token."""
        return self._unfinished

    @property
    def running(self) -> int:
        return sum(len(rank.running) for rank in self.ranks)

    def next_step(self) -> StepPlan | None:
        """The next step, or None if there is nothing to launch until tokens come back."""
        plans = [RankPlan(rank.rank) for rank in self.ranks]
        spare = [self._own_rows(*pair) for pair in zip(self.ranks, plans, strict=True)]
        for rank, plan, tokens in zip(self.ranks, plans, spare, strict=True):
            if self._may_steal(rank):
                self._admit(rank, plan, tokens, may_steal=True)
        for plan in plans:
            self._leaving += plan.preempts
            self.preemptions += len(plan.preempts)
        if not any(plan.tokens for plan in plans):
            return None
        bucket = self._bucket(plans)
        packed = self._packer.pack(plans, [rank.table for rank in self.ranks], bucket)
        self._steps += 1
        return StepPlan(self._steps - 1, bucket, plans, packed)

    def _may_steal(self, rank: Rank) -> bool:
        """A row that moves computes its prefix again: worth it for a rank that would idle, or when
        another rank has no slot for its rows."""
        others = (other for other in self.ranks if other is not rank)
        return not rank.running or any(not other.free_slots for other in others)

    def _own_rows(self, rank: Rank, plan: RankPlan) -> int:
        """Decodes, prefills under way and the rank's own queue; gives the tokens left."""
        rank.begin_step()
        rank.plan_decodes(plan)
        widest = max(bucket.tokens for bucket in self._config.ladder)
        free = min(self._config.step_tokens, widest) - len(plan.decodes)
        budget = min(free, self._policy.budget(rank.view(plan, free, may_steal=False)))
        tokens = rank.continue_prefills(plan, budget)
        return self._admit(rank, plan, tokens, may_steal=False)

    def _admit(self, rank: Rank, plan: RankPlan, tokens: int, *, may_steal: bool) -> int:
        """Rows into the rest of the step while slots and pages last; never behind a preemption."""
        while tokens and rank.free_slots and not plan.preempts:
            view = rank.view(plan, tokens, may_steal=may_steal)
            row = self._policy.peek(view)
            if row is None:
                break
            self._move(row, rank.rank)
            seq = self._suspended.get(row) or Sequence(self._requests[row], row)
            left = rank.admit(seq, plan, tokens)
            if left is None:
                break
            tokens, seq.rank, seq.arrival = left, rank.rank, self._arrivals
            self._arrivals += 1
            self._policy.take(view)
            self._suspended.pop(row, None)
        return tokens

    def _expect(self, row: int, rank: int) -> None:
        cache = self.ranks[rank].cache
        if cache is not None:
            cache.expect(row)

    def _settle(self, row: int, rank: int) -> None:
        cache = self.ranks[rank].cache
        if cache is not None:
            cache.settle(row)

    def _move(self, row: int, rank: int) -> None:
        """A row that runs elsewhere than planned is awaited there."""
        if self._home[row] != rank:
            self._settle(row, self._home[row])
            self._expect(row, rank)
            self._home[row] = rank

    def _bucket(self, plans: list[RankPlan]) -> Bucket:
        """The smallest compiled shape that holds every rank's part."""
        tokens, seqs = max(p.tokens for p in plans), max(p.seqs for p in plans)
        return min(b for b in self._config.ladder if b.tokens >= tokens and b.seqs >= seqs)

    def commit(self, plan: StepPlan, token_RB: np.ndarray, margin_RB: np.ndarray) -> Commit:
        """Take the tokens `[ranks, seqs]` a step drew; rows that end give back slot and pages."""
        ended: list[Ended] = []
        stray = []
        for part in plan.ranks:
            dropped = 0
            tokens, margins = token_RB[part.rank].tolist(), margin_RB[part.rank].tolist()
            for i, seq in part.draws():
                if seq.ended:
                    dropped += 1
                    continue
                if tokens[i] == NO_TOKEN:
                    ended.append(self._end(seq, None))
                    continue
                seq.generated.append(tokens[i])
                seq.margins += margins[i : i + 1] if self._config.record_margins else ()
                reason = self._reason(seq)
                if reason is not None:
                    ended.append(self._end(seq, reason))
            stray.append(dropped)
        self._queue_preempted()
        return Commit(ended, stray)

    def _reason(self, seq: Sequence) -> FinishReason | None:
        request, count = seq.request, len(seq.generated)
        if count >= request.sampling.min_tokens:
            if seq.generated[-1] in request.stop_ids:
                return "stop"
            if request.sampling.stop and self._stop_check(seq):
                return "stop"
        return "length" if count >= request.max_new else None

    def _end(self, seq: Sequence, reason: FinishReason | None) -> Ended:
        seq.ended = True
        self.ranks[seq.rank].release(seq)
        self._packer.forget(seq.row)
        self._unfinished -= 1
        self._policy.observe(seq.row, len(seq.generated))
        return Ended(seq, reason)

    def _queue_preempted(self) -> None:
        """All tokens of the rows preempted by the last plan are in: those that go on wait again."""
        for seq in self._leaving:
            if seq.ended:
                self._settle(seq.row, seq.rank)
            else:
                self._suspended[seq.row] = seq
                self._policy.put_back(seq.rank, seq.row)
        self._leaving.clear()

    def check(self) -> None:
        """Page accounting of every rank; tests call it after each step, the engine at the end."""
        for rank in self.ranks:
            rank.check()
