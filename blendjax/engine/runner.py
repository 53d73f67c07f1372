"""The device side of a run: compiled steps, the donated state, launch and fetch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from blendjax.config import HeadLayout, ModelConfig
from blendjax.model.placement import param_shapes
from blendjax.model.step import DeviceState, PoolSizes, make_step
from blendjax.packing import Bucket, packed_size
from blendjax.sched.plan import StepPlan


class CompiledSteps:
    """Every shape of the ladder compiled ahead; another shape is a `KeyError`, never a compile."""

    def __init__(
        self,
        model: ModelConfig,
        layout: HeadLayout,
        mesh: Mesh,
        *,
        sizes: PoolSizes,
        dtype: Any,
        margins: bool,
    ) -> None:
        self.mesh, self.sizes = mesh, sizes
        self._state = DeviceState.shapes(model, layout, mesh, sizes=sizes)
        self._params = param_shapes(model, layout, mesh, dtype=dtype)
        self._make = lambda bucket: make_step(model, layout, mesh, bucket, margins=margins)
        # "float32" must mean it: accelerators round the operands of a float32 product otherwise
        self._precision = "highest" if dtype == jnp.float32 else "default"
        zeros = lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self._state)
        shardings = jax.tree.map(lambda s: s.sharding, self._state)
        self._zeros = jax.jit(zeros, out_shardings=shardings)
        self.buckets: dict[Bucket, Any] = {}

    def compile(self, ladder: tuple[Bucket, ...]) -> int:
        """Compile what is missing, side by side; gives the number of compiles."""
        missing = [bucket for bucket in ladder if bucket not in self.buckets]
        pool = ThreadPoolExecutor(max_workers=2)
        try:
            self.buckets |= zip(missing, pool.map(self._compile, missing), strict=True)
        finally:  # an interrupt must not wait for compiles
            pool.shutdown(wait=False, cancel_futures=True)
        return len(missing)

    def _compile(self, bucket: Bucket) -> Any:
        packed = jax.ShapeDtypeStruct(
            (self.mesh.devices.shape[0], packed_size(bucket)),
            jnp.int32,
            sharding=NamedSharding(self.mesh, P("data")),
        )
        with jax.default_matmul_precision(self._precision):
            return self._make(bucket).lower(self._params, self._state, packed).compile()

    def zero_state(self) -> DeviceState:
        """A fresh KV pool on the devices."""
        return self._zeros()


class Runner:
    """Runs steps in order. Only `fetch` waits for the device."""

    def __init__(self, steps: CompiledSteps, params: Any) -> None:
        self._steps, self._params = steps, params
        self._state = steps.zero_state()
        self._packed = NamedSharding(steps.mesh, P("data"))

    def launch(self, plan: StepPlan) -> jax.Array:
        """Start the step; its tokens begin their way to the host."""
        step = self._steps.buckets[plan.bucket]
        packed = jax.device_put(plan.packed, self._packed)
        self._state, drawn = step(self._params, self._state, packed)
        drawn.copy_to_host_async()
        return drawn

    @staticmethod
    def fetch(drawn: jax.Array) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int32 and margins float32, `[ranks, seqs]` each."""
        host = np.asarray(drawn)
        return host[:, 0], np.ascontiguousarray(host[:, 1]).view(np.float32)
