"""Seconds a step keeps each resource busy (the per-step conventions of design section 9).

C = (2 P_active n / T + A) / F      K = KV bytes read / BW      Wt = weight bytes / BW
N = ring all-reduces of TP          serial step time = max(C, Wt) + K + N
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from blendjax.config import HeadLayout, ModelConfig
from blendjax.sched.hardware import Hardware
from blendjax.sched.plan import RankPlan
from blendjax.sched.tree import PrefixTree


class Demand(NamedTuple):
    """Seconds of each resource; sums over steps, rows or nodes."""

    compute_s: float
    memory_s: float
    link_s: float = 0.0

    def plus(self, other: Demand) -> Demand:
        return Demand(*(a + b for a, b in zip(self, other, strict=True)))


@dataclasses.dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of `model` on chips of `hardware` under TP `layout.shards`, at `dtype_bytes` a
    number."""

    model: ModelConfig
    layout: HeadLayout
    hardware: Hardware
    dtype_bytes: int

    @property
    def active_params(self) -> float:
        """Parameters a token touches: layers and head."""
        return self.model.layer_params + self.model.vocab * self.model.hidden

    @property
    def weight_bytes(self) -> float:
        """Of one chip and step, replicated and padded heads counted."""
        m, own = self.model, self.layout
        heads = m.hidden * m.head_dim * (2 * own.heads + 2 * own.kv_heads)
        layer = heads + 3 * m.hidden * own.ffn + 2 * m.hidden
        return (m.num_layers * layer + own.vocab * m.hidden) * self.dtype_bytes

    @property
    def weights_s(self) -> float:
        return self.weight_bytes / self.hardware.bytes_per_s

    @property
    def kv_token_bytes(self) -> float:
        """K and V of one token on one chip."""
        m = self.model
        return 2 * m.num_layers * self.layout.kv_heads * m.head_dim * self.dtype_bytes

    def tokens(self, count: int, attention_pairs: float) -> Demand:
        """`count` computed tokens, `attention_pairs` query-key pairs among their prefill rows."""
        m, shards = self.model, self.layout.shards
        attention = 4 * m.num_heads * m.head_dim * m.num_layers * attention_pairs / shards
        flops = 2 * self.active_params * count / shards + attention
        ring = 4 * m.num_layers * (shards - 1) / shards * count * m.hidden * 2
        hw = self.hardware
        return Demand(flops / hw.flops_per_s, 0.0, ring / hw.link_bytes_per_s)

    def kv_reads(self, contexts: float) -> Demand:
        """Decode reads of `contexts` KV tokens in all."""
        return Demand(0.0, self.kv_token_bytes * contexts / self.hardware.bytes_per_s)

    def rank_step(self, plan: RankPlan) -> Demand:
        """One rank's part of a step, weights apart."""
        pairs = sum(c.length * c.start + c.length * (c.length + 1) / 2 for c in plan.chunks)
        return self.tokens(plan.tokens, pairs).plus(self.kv_reads(float(plan.contexts.sum())))

    def serial_s(self, demand: Demand) -> float:
        """Time of a step whose operations run one after another."""
        return max(demand.compute_s, self.weights_s) + demand.memory_s + demand.link_s

    def bound_s(self, work: Work, pool_bytes: float) -> float:
        """T_bound (paper section 2 with weights, collectives and the longest row): no order of
        `work` is faster on these chips with `pool_bytes` of KV on each rank."""
        compute = self.tokens(work.computed_tokens, work.attention_pairs)
        kv_s = self.kv_reads(work.decode_contexts).memory_s / work.ranks
        by_memory = kv_s * self.hardware.bytes_per_s / max(pool_bytes, 1.0)
        steps = max(np.ceil(by_memory), work.longest_output)
        compute_s = (compute.compute_s + compute.link_s) / work.ranks
        return max(compute_s, kv_s + self.weights_s * float(steps))


class Work(NamedTuple):
    """A file's work when every shared prefix is computed once: what the bound is made of."""

    computed_tokens: int
    attention_pairs: float
    decode_contexts: float
    longest_output: int
    ranks: int

    @classmethod
    def of(
        cls,
        prompt_lens: Sequence[int],
        output_lens: Sequence[int],
        *,
        tree: PrefixTree,
        ranks: int,
    ) -> Work:
        """From the lengths that the rows of `tree` really had; d tokens take d - 1 decode steps."""
        p = np.asarray(prompt_lens, np.float64)
        decodes = np.maximum(np.asarray(output_lens, np.float64) - 1, 0)
        return cls(
            computed_tokens=int(tree.distinct_tokens + decodes.sum()),
            attention_pairs=tree.distinct_pairs,
            decode_contexts=float((p * decodes + decodes * (decodes + 1) / 2).sum()),
            longest_output=int(max(output_lens, default=0)),
            ranks=ranks,
        )
