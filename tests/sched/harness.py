"""A whole run without a device: the loop of engine/loop.py with the fake device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fake_device import FakeDevice, continuation
from hypothesis import strategies as st

from blendjax.core import Request, Sampling
from blendjax.packing import Bucket
from blendjax.sched.batcher import Batcher, BatcherConfig, Commit
from blendjax.sched.plan import Sequence as RunningRow
from blendjax.sched.plan import StepPlan
from blendjax.sched.scan import POLICIES, PolicyInput
from blendjax.sched.tree import PrefixTree, build_tree

Watch = Callable[[StepPlan, Commit], None]
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@st.composite
def prompts(draw: st.DrawFn, most: int = 9) -> list[list[int]]:
    """Prompts of which many begin like another one, or are one."""
    made: list[list[int]] = []
    for _ in range(draw(st.integers(1, most))):
        shared = draw(st.sampled_from([[], *made]))
        shared = shared[: draw(st.integers(0, len(shared)))]
        own = draw(TOKENS) if not shared or draw(st.booleans()) else []
        made.append(shared + own)
    return made


def make_request(index: int, prompt: Sequence[int], *, max_new: int = 4, **fields: Any) -> Request:
    stop_ids = frozenset(fields.pop("stop_ids", ()))
    return Request(
        index=index,
        line=index + 1,
        custom_id=f"row-{index}",
        kind="completion",
        prompt_T=np.array(prompt, np.int32),
        sampling=Sampling(**fields),
        seed=fields.get("seed", index * 2**33 + 5),
        max_new=max_new,
        stop_ids=stop_ids,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """`spare_pages`: what a rank has beyond the smallest legal pool: its longest row alone."""

    ranks: int = 1
    slots: int = 4
    page_size: int = 4
    step_tokens: int = 16
    spare_pages: int = 1000
    policy: str = "dfs"
    sharing: bool = True

    def config(self, requests: list[Request]) -> BatcherConfig:
        longest = max(len(r.prompt_T) + r.max_new - 1 for r in requests)
        pages = -(-longest // self.page_size)
        bans = max((len(r.stop_ids) for r in requests), default=0)
        shapes = {(self.slots, self.slots), (self.step_tokens, self.slots)}
        return BatcherConfig(
            ranks=self.ranks,
            slots=self.slots,
            page_size=self.page_size,
            num_pages=1 + pages + self.spare_pages,
            ladder=tuple(Bucket(n, b, pages, bans) for n, b in sorted(shapes)),
            step_tokens=self.step_tokens,
            prefix_sharing=self.sharing,
        )


def stop_check(row: RunningRow) -> bool:
    """Stands for a stop string: the last two tokens are equal."""
    return len(row.generated) > 1 and row.generated[-1] == row.generated[-2]


def expected(request: Request) -> tuple[list[int], str]:
    """The row alone, one token after the other, without pages or batch."""
    tokens: list[int] = []
    while True:
        tokens.append(continuation(request, [*request.prompt_T.tolist(), *tokens]))
        if len(tokens) >= request.sampling.min_tokens:
            stopped = request.sampling.stop and len(tokens) > 1 and tokens[-1] == tokens[-2]
            if tokens[-1] in request.stop_ids or stopped:
                return tokens, "stop"
        if len(tokens) >= request.max_new:
            return tokens, "length"


class Run:
    """Holds what a run did: `answers[row]` = tokens and reason, and every step with its commit."""

    def __init__(self, requests: list[Request], setup: Setup) -> None:
        self.requests, self.setup = requests, setup
        self.config = setup.config(requests)
        self.tree: PrefixTree = build_tree([r.prompt_T for r in requests])
        lens = np.array([len(r.prompt_T) for r in requests], np.int64)
        self.policy = POLICIES[setup.policy](PolicyInput(self.tree, lens, setup.ranks))
        self.batcher = Batcher(requests, self.tree, self.policy, self.config, stop_check=stop_check)
        self.device = FakeDevice(self.config)
        self.answers: dict[int, tuple[list[int], str | None]] = {}
        self.cached: dict[int, int] = {}
        self.steps: list[tuple[StepPlan, Commit]] = []

    def drive(
        self,
        *,
        watch: Watch = lambda plan, commit: None,
        spoil: Callable[[StepPlan, np.ndarray], None] = lambda plan, drawn: None,
    ) -> Run:
        """Launches step k + 1 before it commits step k; `spoil` may change what the device drew."""
        total = sum(len(r.prompt_T) + r.max_new for r in self.requests)
        flying = None
        while self.batcher.unfinished or flying is not None:
            assert len(self.steps) <= 20 + 10 * total, "livelock"
            plan = self.batcher.next_step() if self.batcher.unfinished else None
            assert plan is not None or flying is not None, "rows wait and none can be admitted"
            launched = None if plan is None else (plan, self._launch(plan))
            if flying is not None:
                spoil(*flying)
                self._commit(*flying, watch)
            flying = launched
        self._check_end()
        return self

    def _launch(self, plan: StepPlan) -> np.ndarray:
        self.batcher.check()
        assert plan.bucket in self.config.ladder
        for part, rank in zip(plan.ranks, self.batcher.ranks, strict=True):
            assert part.tokens <= plan.bucket.tokens and part.seqs <= plan.bucket.seqs
            free = [p for p in range(rank.pool.num_pages) if p and not rank.pool.refs(p)]
            self.device.poison(rank.rank, free)
        return self.device.run(plan.packed, plan.bucket)

    def _commit(self, plan: StepPlan, drawn: np.ndarray, watch: Watch) -> None:
        commit = self.batcher.commit(plan, drawn, np.zeros(drawn.shape, np.float32))
        self.batcher.check()
        for seq, reason in commit.ended:
            assert seq.row not in self.answers, f"row {seq.row} ends twice"
            self.answers[seq.row] = list(seq.generated), reason
            self.cached[seq.row] = seq.cached
        self.steps.append((plan, commit))
        watch(plan, commit)

    def _check_end(self) -> None:
        assert sorted(self.answers) == list(range(len(self.requests)))
        assert self.batcher.running == 0
        for rank in self.batcher.ranks:
            rank.begin_step()  # the next step lets go of the last one's copy sources
            rank.check()
            assert rank.pool.free == rank.pool.capacity, "pages are still held"
            assert rank.free_slots == self.config.slots
            assert rank.cache is None or (not rank.cache.held and not any(rank.cache.waiting))

    def check_answers(self) -> None:
        """The schedule changed nothing."""
        want = {row: expected(request) for row, request in enumerate(self.requests)}
        assert self.answers == want

    @property
    def prompt_tokens(self) -> int:
        """Prefill tokens computed in all steps."""
        parts = [part for plan, _ in self.steps for part in plan.ranks]
        return sum(chunk.length for part in parts for chunk in part.chunks)
