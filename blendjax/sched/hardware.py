"""What a chip can do: the presets of the cost model."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Peak rates of one chip. `link` is one way, over what a ring can use."""

    name: str
    flops_per_s: float  # dense 16-bit
    bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float


def _chip(name: str, tflops: float, gb_s: float, gb: float, link_gb_s: float) -> Hardware:
    return Hardware(
        name=name,
        flops_per_s=tflops * 1e12,
        bytes_per_s=gb_s * 1e9,
        memory_bytes=gb * 1e9,
        link_bytes_per_s=link_gb_s * 1e9,
    )


# Vendors' data sheets, but for the last: two CPU cores with AVX-512 as measured by
# benchmarks/roofline.py (float32 GEMM, streamed reads), so that a run on them has a bound too.
CHIPS = {
    chip.name: chip
    for chip in (
        _chip("a100-80g", 312, 2039, 80, 300),
        _chip("h100", 989, 3350, 80, 450),
        _chip("h200", 989, 4800, 141, 450),
        _chip("b200", 2250, 8000, 180, 900),
        _chip("v5e", 197, 819, 16, 90),
        _chip("v5p", 459, 2765, 95, 180),
        _chip("v6e", 918, 1640, 32, 180),
        _chip("v7x", 2307, 7380, 192, 200),
        _chip("cpu", 0.19, 30, 16, 10),
    )
}

# A chip without a preset: nothing is known, so nothing is bounded.
UNKNOWN = _chip("unknown (give --hardware)", 1e15, 1e15, 0, 1e15)

# device_kind of JAX, lower case, contains -> chip
_KINDS = {
    "a100": "a100-80g",
    "h100": "h100",
    "h200": "h200",
    "b200": "b200",
    "v5 lite": "v5e",
    "v5e": "v5e",
    "v5p": "v5p",
    "v5": "v5p",
    "v6": "v6e",
    "7x": "v7x",
    "cpu": "cpu",
}


def hardware_for(device_kind: str) -> Hardware | None:
    """The preset of a JAX `device_kind`, if there is one."""
    kind = device_kind.lower()
    return next((CHIPS[chip] for key, chip in _KINDS.items() if key in kind), None)
