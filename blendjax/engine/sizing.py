"""How big things are made: the ladder of step shapes, and the one place where pages are counted."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from blendjax.config import EngineConfig, HeadLayout, ModelConfig
from blendjax.packing import Bucket
from blendjax.sched.hardware import hardware_for

_CPU_POOL_BYTES = 4 << 30  # host memory that KV may take on all virtual devices together
_DEVICE_SHARE = 0.9  # of an accelerator's memory, before weights and the largest step are taken off


def make_ladder(
    *, slots: int, step_tokens: int, pages_per_seq: int, bans: int, granule: int
) -> tuple[Bucket, ...]:
    """The step shapes a file may need, small to large: decode steps of rising width, then the full
    mixed step. `granule` is the multiple that token counts keep to; `step_tokens` is at most what
    the file can fill."""
    up = lambda n: -(-n // granule) * granule
    widest = up(slots)
    widths, width = [], granule
    while 1.5 * width < widest:  # a shape that saves less than a third is not worth its compile
        widths.append(width)
        width *= 2
    widths.append(widest)
    shapes = [(w, w) for w in widths]
    if up(step_tokens) > widest:
        shapes.append((up(step_tokens), widest))
    return tuple(Bucket(n, b, pages_per_seq, bans) for n, b in shapes)


def num_slots(config: EngineConfig, rows: int) -> int:
    """Sequences that may run at once on a rank, of the `rows` planned for it: each decodes one
    token of every step."""
    return max(1, min(config.max_seqs, config.step_tokens, rows))


def page_bytes(model: ModelConfig, layout: HeadLayout, page_size: int, dtype_bytes: int) -> int:
    """K and V of one page in all layers, on one device."""
    token = 2 * model.num_layers * layout.kv_heads * model.head_dim * dtype_bytes
    return token * page_size


def fit_pages(device: Any, devices: int, *, bytes_per_page: int, taken: int) -> int:
    """Pages that fit on a device next to `taken` bytes (weights on it, and the largest step)."""
    if device.platform == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        room = min(_CPU_POOL_BYTES, memory // 4) // devices
    else:
        room = int(memory_limit(device) * _DEVICE_SHARE) - taken
    return max(0, room // bytes_per_page)


def memory_limit(device: Any) -> float:
    """Bytes of an accelerator: what its runtime says, else what its data sheet says."""
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    chip = hardware_for(device.device_kind)
    return limit or (chip.memory_bytes if chip else 0)


def coarse(count: int) -> int:
    """`count` rounded up by less than a quarter: files of about one size share compiled steps."""
    step = 1 << max(0, count.bit_length() - 3)
    return -(-count // step) * step


def wanted_pages(lengths: np.ndarray, page_size: int) -> int:
    """Pages that hold every row of the file at once, a page more for each (the source of a copy,
    the reserve of admission) and the scratch page: more are never used."""
    return int((-(-lengths // page_size)).sum()) + len(lengths) + 1


def step_bytes(
    model: ModelConfig, layout: HeadLayout, config: EngineConfig, dtype_bytes: int
) -> int:
    """Device memory next to the pool: the weights, and the widest step with its sampler."""
    heads = model.hidden * model.head_dim * 2 * (layout.heads + layout.kv_heads)
    layer = heads + 3 * model.hidden * layout.ffn + 2 * model.hidden
    tables = layout.vocab * model.hidden * (1 if model.tied else 2)
    weights = (model.num_layers * layer + tables) * dtype_bytes
    rows = config.step_tokens * (8 * model.hidden + 4 * layout.ffn) * 4
    logits = config.max_seqs * layout.vocab * 4 * 6  # scores, keys, masses, noise, two masks
    return weights + rows + logits
