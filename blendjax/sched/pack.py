"""Writing step plans into the packed buffer: whole arrays for decode rows, one pass a chunk."""

from __future__ import annotations

import numpy as np

from blendjax.packing import TILE, Bucket, float_bits, pack_into, packed_size
from blendjax.sched.plan import Chunk, RankPlan, Sequence

_ONE = float_bits(np.ones(1))[0]
_SAMPLER_FIELDS = ("temperature", "top_p", "min_p", "top_k")


class Packer:
    """Fills `[ranks, size]` int32. `scratch` is the device slot that takes tokens nobody wants."""

    def __init__(self, page_size: int, slots: int) -> None:
        self._page_size, self._scratch = page_size, slots
        self._sampler: dict[int, np.ndarray] = {}

    def pack(self, plans: list[RankPlan], tables: list[np.ndarray], bucket: Bucket) -> np.ndarray:
        packed = np.empty((len(plans), packed_size(bucket)), np.int32)
        views = [pack_into(row, bucket) for row in packed]
        for view, plan, table in zip(views, plans, tables, strict=True):
            view["slot"][:] = self._scratch
            self._pack_decodes(view, plan, table)
            self._pack_chunks(view, plan, table)
            for i, copy in enumerate(plan.copies):
                view["copy"][i] = copy.source, copy.target, copy.tokens
            view["counts"][:3] = len(plan.decodes), _num_tiles(plan), len(plan.copies)
        self._flag(views)
        return packed

    def _flag(self, views: list[dict[str, np.ndarray]]) -> None:
        """Which parts of the sampler any row of the step needs: the same answer on every rank."""
        for name, flag in (("temperature", 3), ("top_k", 4)):
            value = any(view[name].any() for view in views)
            for view in views:
                view["counts"][flag] = value
        filtered = any(((v["top_p"] != _ONE) & (v["temperature"] != 0)).any() for v in views)
        for view in views:
            view["counts"][5] = filtered

    def _pack_decodes(self, view: dict[str, np.ndarray], plan: RankPlan, table: np.ndarray) -> None:
        n = len(plan.decodes)
        if not n:
            return
        slots = np.fromiter((seq.slot for seq in plan.decodes), np.int64, n)
        pos = plan.contexts - 1
        view["page"][:n] = table[slots]
        view["pos"][:n] = pos
        view["kv_slot"][:n] = self._kv_slots(
            view["page"][np.arange(n), pos // self._page_size], pos
        )
        view["kv_len"][:n] = plan.contexts
        view["slot"][:n] = slots
        view["last_row"][:n] = np.arange(n)
        view["noise_pos"][:n] = plan.contexts
        self._pack_sampler(view, plan.decodes, 0)

    def _kv_slots(self, page: np.ndarray, pos: np.ndarray) -> np.ndarray:
        return page * self._page_size + pos % self._page_size

    def _pack_chunks(self, view: dict[str, np.ndarray], plan: RankPlan, table: np.ndarray) -> None:
        at, tile = len(plan.decodes), 0
        for i, chunk in enumerate(plan.chunks, start=len(plan.decodes)):
            rows = slice(at, at + chunk.length)
            pos = np.arange(chunk.start, chunk.start + chunk.length)
            pages = table[chunk.seq.slot]
            view["token"][rows] = _tokens(chunk)
            view["pos"][rows] = pos
            view["kv_slot"][rows] = self._kv_slots(pages[pos // self._page_size], pos)
            view["page"][i] = pages
            if chunk.last:
                view["slot"][i] = chunk.seq.slot
                view["last_row"][i] = at + chunk.length - 1
                view["noise_pos"][i] = chunk.seq.prefill_len
                self._pack_sampler(view, [chunk.seq], i)
            for first in range(0, chunk.length, TILE):
                length = min(TILE, chunk.length - first)
                view["tile"][tile] = at + first, length, i, chunk.start + first
                tile += 1
            at += chunk.length

    def _pack_sampler(self, view: dict[str, np.ndarray], seqs: list[Sequence], at: int) -> None:
        """Sampling parameters and, until min_tokens are drawn, the ids that would end the row."""
        rows = slice(at, at + len(seqs))
        params = np.stack([self._params(seq) for seq in seqs])
        for column, name in enumerate(_SAMPLER_FIELDS):
            view[name][rows] = params[:, column]
        view["seed"][rows] = params[:, 4:6]
        for i, seq in enumerate(seqs, start=at):
            if seq.planned <= seq.request.sampling.min_tokens:
                ids = sorted(seq.request.stop_ids)
                view["ban"][i, : len(ids)] = ids

    def _params(self, seq: Sequence) -> np.ndarray:
        """The row's constant part, packed once: float bits, top_k and the two words of the seed."""
        held = self._sampler.get(seq.row)
        if held is None:
            s = seq.request.sampling
            temperature = 0.0 if s.greedy else s.temperature
            floats = float_bits(np.array([temperature, max(s.top_p, 1e-6), s.min_p]))
            seed = np.array([seq.request.seed], np.uint64).view(np.int32)
            top_k = 0 if s.greedy else min(s.top_k, np.iinfo(np.int32).max)
            held = np.concatenate([floats, [top_k], seed]).astype(np.int32)
            self._sampler[seq.row] = held
        return held

    def forget(self, row: int) -> None:
        """The row has ended."""
        self._sampler.pop(row, None)


def _tokens(chunk: Chunk) -> np.ndarray:
    """The chunk's tokens, of the prompt and, after a preemption, of what was generated."""
    prompt, stop = chunk.seq.request.prompt_T, chunk.start + chunk.length
    if stop <= len(prompt):
        return prompt[chunk.start : stop]
    return np.concatenate([prompt, np.array(chunk.seq.generated, np.int32)])[chunk.start : stop]


def _num_tiles(plan: RankPlan) -> int:
    return sum(-(-chunk.length // TILE) for chunk in plan.chunks)
