"""Which devices a run gets, and what a user is told who asks for too many."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from blendjax.config import EngineConfig, MeshSpec
from blendjax.engine.llm import LLM
from blendjax.engine.mesh import MeshError, default_mesh, make_mesh, reserve_cpu_devices


def test_the_suite_has_eight_devices() -> None:
    assert len(jax.devices("cpu")) == 8


def test_a_mesh_is_data_by_model() -> None:
    mesh, note = make_mesh(MeshSpec(2, 4))
    assert mesh.shape == {"data": 2, "model": 4}
    assert "8" in note
    assert "cpu" in note


def test_too_many_devices_say_what_to_do(tiny_model: Path) -> None:
    jax.devices()  # the backend has started: nothing can be reserved any more
    for make in (make_mesh, lambda spec: LLM(tiny_model, EngineConfig(mesh=spec))):
        with pytest.raises(MeshError, match=r"3x3 needs 9 devices, found 8.*try a smaller --mesh"):
            make(MeshSpec(3, 3))


def test_default_mesh_on_a_cpu_is_one_device(tiny_model: Path) -> None:
    assert default_mesh(10**12) == MeshSpec(1, 1)
    assert LLM(tiny_model).mesh_spec == MeshSpec(1, 1)


def test_reserving_late_or_nothing_is_harmless() -> None:
    reserve_cpu_devices(None)
    reserve_cpu_devices(MeshSpec(5, 5))
    assert len(jax.devices()) == 8


def test_virtual_devices_are_reserved_before_jax_starts() -> None:
    code = (
        "import jax; from blendjax.config import MeshSpec; from blendjax.engine import mesh; "
        "spec = MeshSpec(2, 3); mesh.reserve_cpu_devices(spec); "
        "print(len(jax.devices()), mesh.make_mesh(spec).mesh.devices.shape)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split("\n")[0] == "6 (2, 3)", done.stderr


@pytest.mark.parametrize(("text", "spec"), [("2x4", (2, 4)), (" 1X8 ", (1, 8)), ("3*1", (3, 1))])
def test_mesh_specs_are_parsed(text: str, spec: tuple[int, int]) -> None:
    assert MeshSpec.parse(text) == MeshSpec(*spec)
    assert str(MeshSpec(*spec)) == f"{spec[0]}x{spec[1]}"


@pytest.mark.parametrize("text", ["", "8", "2x", "0x1", "1x0", "-1x2", "2x4x1", "axb", "1.5x2"])
def test_mesh_specs_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="mesh"):
        MeshSpec.parse(text)
