"""The architecture: imports point one way, the scheduler sees no device, files are short."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "blendjax"
MAX_LINES = 200

DATA = {"core", "config", "packing"}
BELOW_ENGINE = DATA | {"sched", "kernels", "model", "io"}
ALLOWED = {  # part -> the parts of blendjax it may import, besides itself; the graph has no cycle
    "core": set(),
    "config": set(),
    "packing": set(),
    "sched": DATA,
    "kernels": set(),
    "model": DATA | {"kernels"},
    "io": {"core", "config"},
    "engine": BELOW_ENGINE,
    "offline": BELOW_ENGINE | {"engine"},
    "cli": BELOW_ENGINE | {"engine", "offline"},
    "__init__": BELOW_ENGINE | {"engine", "offline"},
}
HOST_ONLY = {*DATA, "sched", "io"}
DEVICE = {"jax", "jaxlib", "flax", "orbax"}

FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Every name that the file imports, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level and node.module, f"{path}:{node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def named(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", FILES, ids=named)
def test_imports_point_one_way(path: Path) -> None:
    names = list(imported(path))
    used = {name.split(".")[1] for name in names if name.startswith("blendjax.")}
    part = part_of(path)
    assert used <= ALLOWED[part] | {part}
    roots = {name.split(".")[0] for name in names}
    assert not roots & {"torch", "transformers", "tests", "scripts"}
    assert part not in HOST_ONLY or not roots & DEVICE, f"{part} must not know of devices"


@pytest.mark.parametrize("path", FILES, ids=named)
def test_files_are_short(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_LINES, f"{lines} lines: split the file, or say it more shortly"


def test_the_host_side_loads_without_jax() -> None:
    """Also what the libraries that it uses bring along: start-up and the simulator count on it."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in FILES
        if part_of(path) in {*HOST_ONLY, "cli"}
    ]
    assert "blendjax.sched.batcher" in modules
    code = (
        f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
        f"print(sorted({DEVICE} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "[]\n"
