"""The one int32 buffer of a step: its field table, and how it is packed and unpacked.

Padding is zeros and harmless by construction: token 0 at position 0 written to the scratch page 0,
a sequence of KV length 0, a sample drawn into the scratch slot.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

TILE = 32  # query rows of one prefill tile
NO_TOKEN = 2**31 - 1  # what a row draws whose logits are not finite


class Bucket(NamedTuple):
    """Static sizes of a step: token rows, sequences, pages a sequence, banned ids a row."""

    tokens: int
    seqs: int
    pages: int
    bans: int = 0

    @property
    def decode_rows(self) -> int:
        """Leading token rows that may be decode rows: the only ones decode attention looks at."""
        return min(self.tokens, self.seqs)

    @property
    def tiles(self) -> int:
        """Prefill tiles that chunks of at most `tokens` rows in all can be cut into."""
        return -(-self.tokens // TILE) + self.seqs


# Field -> its dimensions as Bucket attributes or numbers. Floats travel as their bits.
FIELDS: dict[str, tuple[str | int, ...]] = {
    "counts": (6,),  # decode rows, prefill tiles, page copies; rows that are random, top_k, top_p
    "token": ("tokens",),
    "pos": ("tokens",),
    "kv_slot": ("tokens",),  # page * page_size + offset, where this row's K and V go
    "page": ("seqs", "pages"),  # page table; decode sequences first, longest context first
    "kv_len": ("seqs",),  # context of a decode row, its own token included; 0 for all others
    "slot": ("seqs",),  # where the sampled token is kept on the device
    "last_row": ("seqs",),  # the token row whose logits are sampled
    "temperature": ("seqs",),  # float32 bits; 0 = greedy
    "top_p": ("seqs",),  # float32 bits
    "min_p": ("seqs",),  # float32 bits
    "top_k": ("seqs",),  # 0 = off
    "seed": ("seqs", 2),  # low and high word
    "noise_pos": ("seqs",),  # position of the token drawn, in the row's own text
    "sample": ("seqs",),  # index of the sample among the row's n
    "ban": ("seqs", "bans"),  # ids that may not be drawn yet (min_tokens); -1 = none
    "tile": ("tiles", 4),  # prefill tile: first token row, rows, sequence, position of first row
    "copy": ("seqs", 3),  # partial page: source page, target page, tokens
}


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


def spans(bucket: Bucket) -> Iterator[tuple[str, Span]]:
    """Where each field lies in the packed buffer of `bucket`."""
    start = 0
    for name, dims in FIELDS.items():
        shape = tuple(getattr(bucket, d) if isinstance(d, str) else d for d in dims)
        span = Span(start, shape)
        start = span.stop
        yield name, span


def packed_size(bucket: Bucket) -> int:
    return max(span.stop for _, span in spans(bucket))


def pack_into(packed: np.ndarray, bucket: Bucket) -> dict[str, np.ndarray]:
    """Zero `packed` (int32 [packed_size]) and give each field as a writable view into it."""
    packed[:] = 0
    views = {n: packed[s.start : s.stop].reshape(s.shape) for n, s in spans(bucket)}
    views["ban"][:] = -1
    return views


def unpack(packed: Any, bucket: Bucket) -> dict[str, Any]:
    """Slices with static bounds: the same code reads a numpy array and, in jit, a tracer."""
    return {n: packed[s.start : s.stop].reshape(s.shape) for n, s in spans(bucket)}


def float_bits(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.float32).view(np.int32)
