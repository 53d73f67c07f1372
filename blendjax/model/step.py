"""The one jitted function: unpack -> decoder -> sample -> (state, tokens).

One `shard_map` over ("data", "model") with local code inside: every data rank has its own rows,
page table and pages; the partitioner decides nothing.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from blendjax.config import HeadLayout, ModelConfig
from blendjax.kernels.reference import KVPool
from blendjax.model import layers
from blendjax.model.decoder import forward
from blendjax.model.placement import param_specs
from blendjax.model.sampler import sample
from blendjax.packing import Bucket, unpack


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class DeviceState:
    """All that lives on the devices between steps; donated to each step.

    `k`, `v`: `[data, model, L * pages, K, S, E]`; `last_token`: `[data, slots + 1]`, the last slot
    is scratch. Made by `CompiledSteps.zero_state`.
    """

    k: Any  # Array, or its ShapeDtypeStruct or PartitionSpec
    v: Any
    last_token: Any

    @staticmethod
    def specs() -> DeviceState:
        return DeviceState(P("data", "model"), P("data", "model"), P("data"))

    @classmethod
    def shapes(
        cls, model: ModelConfig, layout: HeadLayout, mesh: Mesh, *, sizes: PoolSizes
    ) -> DeviceState:
        """The state as `jax.ShapeDtypeStruct`s with their shardings."""
        data, shards = mesh.devices.shape
        pool = (
            data,
            shards,
            model.num_layers * sizes.pages,
            layout.kv_heads,
            sizes.page_size,
            model.head_dim,
        )
        shaped = lambda shape, dtype, spec: jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh, spec)
        )
        specs = cls.specs()
        return cls(
            shaped(pool, sizes.dtype, specs.k),
            shaped(pool, sizes.dtype, specs.v),
            shaped((data, sizes.slots + 1), jnp.int32, specs.last_token),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """What the device state holds on each data rank."""

    pages: int  # of one layer, the scratch page included
    page_size: int
    slots: int
    dtype: Any


def make_step(
    model: ModelConfig, layout: HeadLayout, mesh: Mesh, bucket: Bucket, *, margins: bool
) -> jax.stages.Wrapped:
    """A jitted `(params, state, packed [data, size] int32) -> (state, drawn [data, 2, seqs]
    int32)`.

    `drawn` holds the sampled token of every sequence and the bits of its float32 margin.
    """
    local = partial(_local_step, model=model, layout=layout, bucket=bucket, margins=margins)
    state_specs = DeviceState.specs()
    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(param_specs(model), state_specs, P("data")),
            out_specs=(state_specs, P("data")),
            check_vma=False,
        ),
        donate_argnums=1,
    )


def _local_step(
    params: dict[str, Any],
    state: DeviceState,
    packed: Array,
    *,
    model: ModelConfig,
    layout: HeadLayout,
    bucket: Bucket,
    margins: bool,
) -> tuple[DeviceState, Array]:
    params = jax.tree.map(lambda a: a[0], params)  # the leading axis is the shard's own
    batch = unpack(packed[0], bucket)
    last_token = state.last_token[0]
    pool, x_ND = forward(
        params,
        KVPool(state.k[0, 0], state.v[0, 0]),
        batch,
        token_N=_tokens(batch, last_token, bucket),
        model=model,
        layout=layout,
        decode_rows=bucket.decode_rows,
    )
    x_BD = jnp.take(x_ND, batch["last_row"], axis=0, mode="clip")
    logit_BV = layers.unembed(x_BD, params.get("head", params["embed"]))
    draw = sample(logit_BV, batch, vocab=model.vocab, margins=margins)
    last_token = last_token.at[batch["slot"]].set(draw.token_B, mode="drop")
    state = DeviceState(pool.k_MKSE[None, None], pool.v_MKSE[None, None], last_token[None])
    margin_bits = lax.bitcast_convert_type(draw.margin_B, jnp.int32)
    return state, jnp.stack([draw.token_B, margin_bits])[None]


def _tokens(batch: dict[str, Array], last_token: Array, bucket: Bucket) -> Array:
    """Decode rows continue from the token that stayed on the device; prefill rows bring theirs."""
    rows = bucket.decode_rows
    is_decode = jnp.arange(bucket.tokens) < batch["counts"][0]
    carried = jnp.zeros(bucket.tokens, jnp.int32)
    carried = carried.at[:rows].set(jnp.take(last_token, batch["slot"][:rows], mode="clip"))
    return jnp.where(is_decode, carried, batch["token"])
