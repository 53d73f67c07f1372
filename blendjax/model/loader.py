"""What a checkpoint must answer: one table names every tensor of the architecture.

A format only has to give `read(name)` as a float32 array in the table's orientation. `check`
compares names and shapes with the table before anything is allocated: a missing tensor, an unused
one or a wrong shape stops the load. `placement.place` then puts the tensors on the mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from blendjax.config import ModelConfig


class CheckpointError(ValueError):
    """The checkpoint can't be used: what is wrong, where, and what to try."""


class Checkpoint(Protocol):
    """A source of tensors, named and oriented as `tensor_table` says."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor the files hold, by the table's names (others keep their own names)."""
        ...

    def read(self, name: str) -> np.ndarray:
        """float32, with the shape of the table."""
        ...


def tensor_table(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor. Matrices are [in, out]; `{}` stands for the layer."""
    d, f, e = model.hidden, model.ffn, model.head_dim
    table: dict[str, tuple[int, ...]] = {"embed": (model.vocab, d), "norm": (d,)}
    if not model.tied:
        table["head"] = (model.vocab, d)
    for i in range(model.num_layers):
        table |= {
            f"layers.{i}.attn_norm": (d,),
            f"layers.{i}.q": (d, model.num_heads * e),
            f"layers.{i}.k": (d, model.num_kv_heads * e),
            f"layers.{i}.v": (d, model.num_kv_heads * e),
            f"layers.{i}.out": (model.num_heads * e, d),
            f"layers.{i}.ffn_norm": (d,),
            f"layers.{i}.gate": (d, f),
            f"layers.{i}.up": (d, f),
            f"layers.{i}.down": (f, d),
        }
    return table


def check(checkpoint: Checkpoint, model: ModelConfig) -> None:
    """Every tensor of the table is there with its shape, and nothing else is."""
    have, want = checkpoint.shapes(), tensor_table(model)
    missing, unused = sorted(want.keys() - have.keys()), sorted(have.keys() - want.keys())
    if missing:
        raise CheckpointError(f"{len(missing)} tensors are missing, first {missing[0]!r}")
    if unused:
        raise CheckpointError(
            f"{len(unused)} tensors would be left unused, first {unused[0]!r}: "
            "the architecture is not plain Llama"
        )
    for name, shape in want.items():
        if tuple(have[name]) != shape:
            raise CheckpointError(f"tensor {name!r} is {tuple(have[name])}, expected {shape}")


def inverse_frequencies(model: ModelConfig) -> np.ndarray:
    """RoPE frequencies [J], float32; `rope_factors` divide them (the llama3 scaling)."""
    exponent = np.arange(0, model.head_dim, 2, dtype=np.float32) / model.head_dim
    freq = 1.0 / np.float32(model.rope_theta) ** exponent
    if model.rope_factors is not None:
        freq = freq / np.asarray(model.rope_factors, np.float32)
    return freq.astype(np.float32)
