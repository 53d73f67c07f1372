"""One file's run on an open model: plan it, warm up, iterate over the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from blendjax.config import SettingError
from blendjax.core import Completion, PromptRow, Request, RowError
from blendjax.engine import sizing
from blendjax.engine.job import Job, fit_to_pool, make_job
from blendjax.engine.loop import LoopStats, Pause, drive
from blendjax.engine.runner import Runner
from blendjax.engine.text import TextTracker
from blendjax.model.step import PoolSizes
from blendjax.packing import Bucket
from blendjax.sched.batcher import Batcher, BatcherConfig, Commit, Ended
from blendjax.sched.plan import StepPlan
from blendjax.sched.scan import POLICIES, Policy, PolicyInput
from blendjax.sched.tree import build_tree

if TYPE_CHECKING:
    from blendjax.engine.llm import LLM

Say = Callable[[str], None]
Watch = Callable[[StepPlan, Commit], None]


class Run:
    """One file's run. Iterate once: error rows first, then rows as they end."""

    def __init__(self, llm: LLM, rows: Sequence[PromptRow | RowError], say: Say) -> None:
        self.llm, config = llm, llm.config
        began = time.perf_counter()
        job = make_job(rows, llm.codec, config, max_model_len=llm.max_model_len)
        self.num_pages = self._count_pages(job)
        self.job = fit_to_pool(job, capacity_tokens=(self.num_pages - 1) * config.page_size)
        self.tree = build_tree([r.prompt_T for r in self.job.requests])
        self._text = TextTracker(llm.codec)
        self.stats = LoopStats()
        self.plan_s = time.perf_counter() - began
        self.compile_s = self.run_s = 0.0
        self.compiles = 0
        self._runner: Runner | None = None
        self.ended: list[tuple[int, int, int, int]] = []  # prompt, output, cached, recomputed
        if self.job.requests:
            self._prepare(say)

    def _count_pages(self, job: Job) -> int:
        """Pages of a rank: what was asked for, else what the file can use and memory holds."""
        llm, config = self.llm, self.llm.config
        if config.num_pages is not None:
            return config.num_pages
        lengths = np.array([len(r.prompt_T) + r.max_new - 1 for r in job.requests], np.int64)
        wanted = sizing.wanted_pages(lengths, config.page_size)
        size = sizing.page_bytes(llm.model, llm.layout, config.page_size, llm.dtype.itemsize)
        mesh = llm.devices.mesh
        fits = sizing.fit_pages(
            mesh.devices.flat[0],
            mesh.size,
            bytes_per_page=size,
            taken=sizing.step_bytes(llm.model, llm.layout, config, llm.dtype.itemsize),
        )
        prompt = max((len(r.prompt_T) for r in job.requests), default=0)
        if (fits - 1) * config.page_size < prompt:
            raise SettingError(
                f"a data rank has room for {max(0, fits - 1) * config.page_size} KV tokens, the "
                f"longest prompt has {prompt}; try more model shards in --mesh, or --num-pages"
            )
        return max(2, min(sizing.coarse(wanted), fits))

    def _prepare(self, say: Say) -> None:
        config, requests, mesh = self.llm.config, self.job.requests, self.llm.devices.mesh
        began = time.perf_counter()
        lens = np.array([len(r.prompt_T) for r in requests], np.int64)
        policy = POLICIES[config.policy](PolicyInput(self.tree, lens, self.llm.mesh_spec.data))
        homes = np.bincount([policy.home(row) for row in range(len(requests))])
        slots = sizing.num_slots(config, int(homes.max()))
        longest = max(len(r.prompt_T) + r.max_new - 1 for r in requests)
        bans = max((len(r.stop_ids) for r in requests if r.sampling.min_tokens), default=0)
        ladder = sizing.make_ladder(
            slots=slots,
            step_tokens=min(config.step_tokens, int(lens.sum()) + slots),
            pages_per_seq=sizing.coarse(-(-longest // config.page_size)),
            bans=sizing.coarse(bans),
            granule=16 if mesh.devices.flat[0].platform == "cpu" else 128,
        )
        self.batcher = self._make_batcher(policy, ladder, slots)
        self.plan_s += time.perf_counter() - began
        began = time.perf_counter()
        self._steps = self.llm.steps(
            PoolSizes(
                pages=self.num_pages,
                page_size=config.page_size,
                slots=max(bucket.seqs for bucket in ladder),
                dtype=self.llm.dtype,
            )
        )
        self.compiles = self._steps.compile(ladder)
        self.compile_s = time.perf_counter() - began
        say(f"compiled {self.compiles} step shapes in {self.compile_s:.1f} s")

    def _make_batcher(self, policy: Policy, ladder: tuple[Bucket, ...], slots: int) -> Batcher:
        config = self.llm.config
        return Batcher(
            self.job.requests,
            self.tree,
            policy,
            BatcherConfig(
                ranks=self.llm.mesh_spec.data,
                slots=slots,
                page_size=config.page_size,
                num_pages=self.num_pages,
                ladder=ladder,
                step_tokens=config.step_tokens,
                record_margins=config.record_margins,
                prefix_sharing=config.prefix_sharing,
            ),
            stop_check=self._text.stopped,
        )

    @property
    def preemptions(self) -> int:
        return self.batcher.preemptions if self.job.requests else 0

    def warm(self) -> Runner | None:
        """Weights and KV pool on the devices: nothing compiles behind this point."""
        if self._runner is None and self.job.requests:
            self._runner = Runner(self._steps, self.llm.params())
        return self._runner

    def __iter__(self) -> Iterator[Completion | RowError]:
        yield from self.answers()

    def answers(
        self, watch: Watch = lambda plan, commit: None, pause: Pause = lambda: None
    ) -> Iterator[Completion | RowError]:
        """Every row's answer once; `watch` sees each step after its tokens are in, `pause` is
        called between steps and may raise."""
        yield from self.job.errors
        runner = self.warm()
        if runner is None:
            return
        began = time.perf_counter()
        for ended in drive(self.batcher, runner, self.stats, observe=watch, pause=pause):
            for end in ended:
                yield self._answer(end)
            self.run_s = time.perf_counter() - began
        self.batcher.check()

    def _answer(self, end: Ended) -> Completion | RowError:
        seq = end.seq
        request = seq.request
        self.ended.append((len(request.prompt_T), len(seq.generated), seq.cached, seq.recomputed))
        self._text.forget(seq)
        if end.reason is None:
            return _not_finite(request)
        return self._text.complete(seq, end.reason)


def _not_finite(request: Request) -> RowError:
    return RowError(
        index=request.index,
        line=request.line,
        custom_id=request.custom_id,
        code="non_finite_logits",
        message=f"line {request.line}: the model's scores were not finite for this row; "
        "try --dtype float32",
    )
