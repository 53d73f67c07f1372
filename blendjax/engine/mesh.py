"""The device mesh: real devices where there are enough, virtual CPU devices where there aren't."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from blendjax.config import MeshSpec
from blendjax.engine.sizing import memory_limit


class MeshError(RuntimeError):
    """The mesh can't be made; the message says what would work."""


class DeviceMesh(NamedTuple):
    mesh: Mesh  # axes ("data", "model")
    note: str  # one line about the devices in use


def reserve_cpu_devices(spec: MeshSpec | None) -> None:
    """Ask for enough virtual CPU devices. Must run before anything asks JAX for devices: that
    starts the backends, and their number is fixed from then on."""
    if spec is None:
        return
    try:
        have = jax.config.values["jax_num_cpu_devices"]
        jax.config.update("jax_num_cpu_devices", max(spec.size, have))
    except RuntimeError:
        pass  # started already: make_mesh says so if they are too few


def default_mesh(weight_bytes: int) -> MeshSpec:
    """All accelerators, on the fewest model shards that leave 30% of memory for KV; CPU: 1x1."""
    devices = jax.devices()
    if devices[0].platform == "cpu":
        return MeshSpec(1, 1)
    limit = memory_limit(devices[0])
    sizes = [m for m in range(1, len(devices) + 1) if len(devices) % m == 0]
    fitting = [m for m in sizes if weight_bytes / m <= 0.7 * limit]
    shards = min(fitting, default=len(devices))
    return MeshSpec(len(devices) // shards, shards)


def make_mesh(spec: MeshSpec) -> DeviceMesh:
    """Devices as `data x model`; virtual CPU devices if the accelerators are too few."""
    real = jax.devices()
    if len(real) >= spec.size:
        virtual = "virtual " if real[0].platform == "cpu" and spec.size > 1 else ""
        return DeviceMesh(_grid(real, spec), f"{spec.size} {virtual}{real[0].device_kind}")
    try:
        virtual = jax.devices("cpu")
    except RuntimeError:
        virtual = []
    if len(virtual) < spec.size:
        raise MeshError(
            f"mesh {spec} needs {spec.size} devices, found {len(real)} {real[0].platform} and "
            f"{len(virtual)} cpu; try a smaller --mesh, or start JAX after "
            f"jax.config.update('jax_num_cpu_devices', {spec.size})"
        )
    note = f"{spec.size} virtual CPU devices ({len(real)} {real[0].platform} found)"
    return DeviceMesh(_grid(virtual, spec), note)


def _grid(devices: Sequence[Any], spec: MeshSpec) -> Mesh:
    grid = np.array(devices[: spec.size]).reshape(spec.data, spec.model)
    return Mesh(grid, ("data", "model"))
