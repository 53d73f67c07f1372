"""A device of whole numbers: runs packed steps, and knows which prefix each KV slot stands for.

Two "layers", as the real decoder has many: the first keeps (position, token) in a slot, the second
a hash of the whole prefix that the first one let the row read. A row that reads one slot of another
prefix, a freed page or a position not yet written is therefore seen at once.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable

import numpy as np

from blendjax.core import Request
from blendjax.packing import Bucket, unpack
from blendjax.sched.batcher import BatcherConfig

VOCAB = 11
POISON = -1  # in slots that nobody may read
UNWANTED = 10**6  # what a sequence that draws nothing gets

Views = dict[str, np.ndarray]


def mix(state: int, value: int) -> int:
    return (state * 1_000_003 + value + 12_345) % (2**61 - 1)


def prefix_hashes(tokens: Iterable[int]) -> list[int]:
    """One hash for each prefix, the whole included."""
    return list(itertools.accumulate((int(t) for t in tokens), mix, initial=7))[1:]


def pick(prefix: int, sampler: Iterable[int], banned: set[int]) -> int:
    """The token that follows: a hash of the prefix and all that the sampler is told."""
    for value in sampler:
        prefix = mix(prefix, int(value))
    token = (prefix >> 9) % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def continuation(request: Request, prefix: list[int]) -> int:
    """What the device must draw after `prefix`: prompt and all tokens so far of the row alone."""
    s = request.sampling
    floats = struct.unpack("<3i", struct.pack("<3f", s.temperature, s.top_p, s.min_p))
    words = struct.unpack("<2i", struct.pack("<Q", request.seed))
    top_k = s.top_k if s.temperature else 0
    drawn = len(prefix) - len(request.prompt_T)
    banned = set(request.stop_ids) if drawn < s.min_tokens else set()
    return pick(prefix_hashes(prefix)[-1], (*floats, top_k, *words, len(prefix), 0), banned)


class FakeDevice:
    def __init__(self, config: BatcherConfig) -> None:
        pool = (2, config.ranks, config.num_pages, config.page_size)
        self._kv = np.full(pool, POISON, np.int64)
        self._last_token = np.full((config.ranks, config.slots + 1), POISON, np.int64)
        self._size, self._scratch = config.page_size, config.slots

    def poison(self, rank: int, pages: list[int]) -> None:
        self._kv[:, rank, pages] = POISON

    def run(self, packed: np.ndarray, bucket: Bucket) -> np.ndarray:
        """Tokens `[ranks, seqs]`."""
        views = [unpack(part, bucket) for part in packed]
        return np.stack([self._run_rank(rank, view) for rank, view in enumerate(views)])

    def _run_rank(self, rank: int, view: Views) -> np.ndarray:
        rows = self._rows(view)
        live = len(rows)
        slots = view["kv_slot"][:live].tolist()
        assert len(set(slots)) == live, "two rows write one slot"
        assert all(s >= self._size for s in slots), "a live row writes to the scratch page"
        assert not view["kv_slot"][live:].any(), "padding writes to a live page"
        assert view["page"].min() >= 0 and view["page"].max() < self._kv.shape[2]
        decodes = view["counts"][0]
        token = view["token"].astype(np.int64)
        token[:decodes] = self._last_token[rank, view["slot"][:decodes]]
        assert ((token >= 0) & (token < VOCAB)).all(), "a decode row has no last token"

        read = self._layer(self._kv[0, rank], view, rows, view["pos"] * VOCAB + token)
        hashes = []
        for (_, pos), seen in zip(rows, read, strict=True):
            assert (seen // VOCAB == np.arange(pos + 1)).all(), "a slot of another position"
            hashes.append(prefix_hashes(seen % VOCAB))
        prefix = np.zeros(len(token), np.int64)
        prefix[:live] = [h[-1] for h in hashes]
        read = self._layer(self._kv[1, rank], view, rows, prefix)
        for want, seen in zip(hashes, read, strict=True):
            assert seen.tolist() == want, "a slot was computed behind another prefix"
        drawn = np.array([self._draw(view, i, prefix) for i in range(len(view["slot"]))])
        self._last_token[rank, view["slot"]] = drawn
        return drawn

    def _rows(self, view: Views) -> list[tuple[int, int]]:
        """(sequence, position) of each live token row: as the two attention kernels find them."""
        decodes, tiles, _ = view["counts"][:3].tolist()
        rows = [(i, int(view["kv_len"][i]) - 1) for i in range(decodes)]
        for first, length, seq, pos in view["tile"][:tiles].tolist():
            assert first == len(rows), "prefill tiles must touch"
            rows += [(seq, pos + i) for i in range(length)]
        assert [pos for _, pos in rows] == view["pos"][: len(rows)].tolist()
        assert not view["kv_len"][decodes:].any()
        assert (np.diff(view["kv_len"][:decodes]) <= 0).all(), "longest context first"
        return rows

    def _layer(
        self, kv: np.ndarray, view: Views, rows: list[tuple[int, int]], value: np.ndarray
    ) -> list[np.ndarray]:
        """Write all rows, copy pages in order, then each row reads up to its position."""
        kv.reshape(-1)[view["kv_slot"]] = value
        for source, target, tokens in view["copy"][: view["counts"][2]].tolist():
            kv[target, :tokens] = kv[source, :tokens]
        read = []
        for seq, pos in rows:
            at = np.arange(pos + 1)
            seen = kv[view["page"][seq][at // self._size], at % self._size]
            assert (seen != POISON).all(), "a row reads a slot that nobody wrote for it"
            read.append(seen)
        return read

    def _draw(self, view: Views, i: int, prefix: np.ndarray) -> int:
        if view["slot"][i] == self._scratch:
            return UNWANTED
        names = ("temperature", "top_p", "min_p", "top_k", "seed", "noise_pos", "sample")
        sampler = np.concatenate([np.atleast_1d(view[name][i]) for name in names])
        return pick(int(prefix[view["last_row"][i]]), sampler, set(view["ban"][i].tolist()))
