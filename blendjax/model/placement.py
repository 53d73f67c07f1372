"""Checkpoint -> parameters on the mesh: stacked over layers, fused, padded and cut for TP.

Every parameter has a leading axis over "model", one slice a shard. How heads, FFN columns and
vocabulary lie on the shards is `HeadLayout`'s business; this file only carries it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from blendjax.config import HeadLayout, ModelConfig
from blendjax.model.loader import Checkpoint, inverse_frequencies


def param_specs(model: ModelConfig) -> dict[str, Any]:
    """Every parameter has a leading axis over "model": one slice a shard, replicated over
    "data"."""
    one = P("model")
    tree: dict[str, Any] = {"embed": one, "norm": one, "inv_freq": one}
    if not model.tied:
        tree["head"] = one
    names = ("attn_norm", "qkv", "out", "ffn_norm", "gate_up", "down")
    return tree | {"layers": dict.fromkeys(names, one)}


def param_shapes(
    model: ModelConfig, layout: HeadLayout, mesh: Mesh, *, dtype: Any
) -> dict[str, Any]:
    """The tree of `place` as `jax.ShapeDtypeStruct`s: steps compile while the weights load."""
    d, e, n = model.hidden, model.head_dim, model.num_layers
    sharding = NamedSharding(mesh, P("model"))
    leaf = lambda *shape, kind=dtype: jax.ShapeDtypeStruct(
        (layout.shards, *shape), kind, sharding=sharding
    )
    tree: dict[str, Any] = {
        "embed": leaf(layout.vocab, d),
        "norm": leaf(d),
        "inv_freq": leaf(e // 2, kind=np.float32),
        "layers": {
            "attn_norm": leaf(n, d),
            "qkv": leaf(n, d, (layout.heads + 2 * layout.kv_heads) * e),
            "out": leaf(n, layout.heads * e, d),
            "ffn_norm": leaf(n, d),
            "gate_up": leaf(n, d, 2 * layout.ffn),
            "down": leaf(n, layout.ffn, d),
        },
    }
    return tree if model.tied else tree | {"head": leaf(layout.vocab, d)}


def place(
    checkpoint: Checkpoint, model: ModelConfig, layout: HeadLayout, mesh: Mesh, *, dtype: Any
) -> dict[str, Any]:
    """The parameter tree on the mesh: fused, padded and cut as `layout` says, one kind at a
    time."""
    shapes = param_shapes(model, layout, mesh, dtype=dtype)
    shards = range(layout.shards)

    def put(shape: jax.ShapeDtypeStruct, full: np.ndarray) -> jax.Array:
        """`full[i]` is shard i's slice."""
        return jax.make_array_from_callback(shape.shape, shape.sharding, full.__getitem__)

    def plain(key: str, cut: Callable[[np.ndarray, int], np.ndarray]) -> jax.Array:
        whole = checkpoint.read(key)
        return put(shapes[key], np.stack([cut(whole, s) for s in shards]).astype(dtype))

    def stacked(key: str, sources: str, cut: Callable[..., np.ndarray]) -> jax.Array:
        """One kind of all layers: each source tensor is read once, then cut for every shard."""
        shape = shapes["layers"][key]
        full = np.empty(shape.shape, dtype)
        for i in range(model.num_layers):
            tensors = [checkpoint.read(f"layers.{i}.{name}") for name in sources.split()]
            for s in shards:
                full[s, i] = cut(*tensors, s)
        return put(shape, full)

    rows = lambda whole, s: _rows(whole, s, layout.vocab)
    same = lambda whole, s: whole
    frequencies = np.stack([inverse_frequencies(model)] * layout.shards)
    tree: dict[str, Any] = {
        "embed": plain("embed", rows),
        "norm": plain("norm", same),
        "inv_freq": put(shapes["inv_freq"], frequencies),
        "layers": {
            "attn_norm": stacked("attn_norm", "attn_norm", same),
            "qkv": stacked("qkv", "q k v", lambda *t: _qkv(*t, model=model, layout=layout)),
            "out": stacked("out", "out", lambda t, s: _out(t, s, model, layout)),
            "ffn_norm": stacked("ffn_norm", "ffn_norm", same),
            "gate_up": stacked("gate_up", "gate up", lambda g, u, s: _gate_up(g, u, s, layout)),
            "down": stacked("down", "down", lambda t, s: _rows(t, s, layout.ffn)),
        },
    }
    return tree if model.tied else tree | {"head": plain("head", rows)}


def _rows(full: np.ndarray, shard: int, rows: int) -> np.ndarray:
    """Rows of one shard, zero-padded at the end of the matrix."""
    part = full[shard * rows : (shard + 1) * rows]
    return np.pad(part, ((0, rows - len(part)), *[(0, 0)] * (full.ndim - 1)))


def _heads(full: np.ndarray, shard: int, model: ModelConfig, layout: HeadLayout) -> np.ndarray:
    """Query heads `[K, G, E, ...]` of a full matrix -> the shard's `[kv_heads, group, E, ...]`.

    Copy c of KV head j serves query heads c * group ... of its group; heads that pad are zero.
    """
    shape = (model.num_kv_heads, model.group, model.head_dim, *full.shape[1:])
    grouped = full.reshape(shape)
    local = np.zeros((layout.kv_heads, layout.group, *shape[2:]), full.dtype)
    for slot in range(layout.kv_heads):
        head, copy = divmod(shard * layout.kv_heads + slot, layout.replicas)
        if head < model.num_kv_heads:
            part = grouped[head, copy * layout.group : (copy + 1) * layout.group]
            local[slot, : len(part)] = part
    return local


def _kv_heads(full: np.ndarray, shard: int, model: ModelConfig, layout: HeadLayout) -> np.ndarray:
    """KV heads `[K * E, D]` -> the shard's copies `[kv_heads, E, D]`."""
    heads = full.reshape(model.num_kv_heads, model.head_dim, -1)
    local = np.zeros((layout.kv_heads, *heads.shape[1:]), full.dtype)
    for slot in range(layout.kv_heads):
        head = (shard * layout.kv_heads + slot) // layout.replicas
        if head < model.num_kv_heads:
            local[slot] = heads[head]
    return local


def _qkv(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    shard: int,
    *,
    model: ModelConfig,
    layout: HeadLayout,
) -> np.ndarray:
    """Queries, keys, values as one [D, (heads + 2 kv_heads) * E]."""
    parts = (
        _heads(q.T, shard, model, layout),
        _kv_heads(k.T, shard, model, layout),
        _kv_heads(v.T, shard, model, layout),
    )
    return np.concatenate([part.reshape(-1, model.hidden) for part in parts]).T


def _out(full: np.ndarray, shard: int, model: ModelConfig, layout: HeadLayout) -> np.ndarray:
    return _heads(full, shard, model, layout).reshape(-1, model.hidden)


def _gate_up(gate: np.ndarray, up: np.ndarray, shard: int, layout: HeadLayout) -> np.ndarray:
    return np.concatenate([_rows(w.T, shard, layout.ffn) for w in (gate, up)]).T
