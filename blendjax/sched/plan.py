"""What a step does, as plain data: made by the batcher, packed for the device, logged for the
reader."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from blendjax.core import FinishReason, Request
from blendjax.packing import Bucket


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatcherConfig:
    """Sizes the batcher must keep to. `num_pages` counts per rank, the scratch page included."""

    ranks: int
    slots: int
    page_size: int
    num_pages: int
    ladder: tuple[Bucket, ...]
    step_tokens: int
    prefix_sharing: bool = True
    record_margins: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """A row while it runs on a rank. `computed` and `planned` count launched work; the tokens
    themselves arrive one step later in `generated`."""

    request: Request
    row: int  # its place in the tree and the policy; `request.index` is its place in the file
    rank: int = 0
    arrival: int = 0  # admission number: the youngest is preempted first
    slot: int = -1
    prefill_len: int = 0  # tokens to compute before it draws: prompt, and what it had generated
    computed: int = 0  # tokens whose K and V are written by launched steps
    planned: int = 0  # tokens drawn by launched steps
    cached: int = 0  # prompt tokens found in a shared prefix at the first admission
    recomputed: int = 0  # tokens computed again after preemptions
    generated: list[int] = dataclasses.field(default_factory=list)
    margins: list[float] = dataclasses.field(default_factory=list)
    ended: bool = False
    _reached: int = 0  # the furthest `computed` of an earlier stay

    def start(self, slot: int, cached: int) -> None:
        """Take a slot, with the KV of `cached` tokens at hand."""
        if not self._reached:
            self.cached = cached
        self.recomputed += max(0, min(self._reached, self.prefill_len) - cached)
        self.slot, self.computed, self.planned = slot, cached, len(self.generated)

    def leave(self) -> None:
        """Give up the slot; what was computed is gone, what was generated stays."""
        self.slot, self._reached = -1, max(self._reached, self.computed)

    @property
    def prefilling(self) -> bool:
        return self.computed < self.prefill_len

    @property
    def drained(self) -> bool:
        """It has been given its last token: nothing more to launch."""
        return self.planned >= self.request.max_new


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """`length` prompt tokens from position `start`; `last` draws the first token."""

    seq: Sequence
    start: int
    length: int

    @property
    def last(self) -> bool:
        """The chunk that completes the prefill."""
        return self.start + self.length == self.seq.prefill_len


@dataclasses.dataclass(frozen=True, slots=True)
class PageCopy:
    source: int
    target: int
    tokens: int


@dataclasses.dataclass(slots=True)
class RankPlan:
    """One rank's part of a step. `contexts[i]` is the KV length of `decodes[i]`, its token
    included."""

    rank: int
    decodes: list[Sequence] = dataclasses.field(default_factory=list)
    contexts: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    copies: list[PageCopy] = dataclasses.field(default_factory=list)
    admits: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list)  # cached tokens
    preempts: list[Sequence] = dataclasses.field(default_factory=list)
    idles: list[Sequence] = dataclasses.field(default_factory=list)

    def draws(self) -> Iterator[tuple[int, Sequence]]:
        """Sequences that draw a token in this step, with their place in it."""
        yield from enumerate(self.decodes)
        for i, chunk in enumerate(self.chunks, start=len(self.decodes)):
            if chunk.last:
                yield i, chunk.seq

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(chunk.length for chunk in self.chunks)

    @property
    def seqs(self) -> int:
        return len(self.decodes) + len(self.chunks)


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """All ranks' parts, and the packed buffer `[ranks, size]` int32 for the device."""

    step: int
    bucket: Bucket
    ranks: list[RankPlan]
    packed: np.ndarray


class Ended(NamedTuple):
    """`reason` is None for a row whose logits were not finite: it has no answer."""

    seq: Sequence
    reason: FinishReason | None


class Commit(NamedTuple):
    """What a step's tokens brought: rows that ended, and tokens dropped by each rank."""

    ended: list[Ended]
    stray: list[int]
