"""The command as a user runs it: a process, a file in, files out."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "offline_infer.py"


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """What a finished command left: its status, its lines on stderr, and its output file."""

    status: int
    lines: list[str]
    output: Path

    @property
    def last(self) -> str:
        return self.lines[-1]

    def rows(self) -> list[dict[str, Any]]:
        return [strict_json(line) for line in self.output.read_bytes().splitlines()]

    def by_id(self) -> dict[str, dict[str, Any]]:
        rows = self.rows()
        found = {row["custom_id"]: row for row in rows}
        assert len(found) == len(rows), "a custom_id has two lines"
        return found


def strict_json(line: bytes) -> dict[str, Any]:
    """A line that any JSON reader takes: no NaN, no broken text, no key twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = line.decode("utf-8")
    return json.loads(text, parse_constant=refuse, object_pairs_hook=unique)


def command(*args: object) -> list[str]:
    return [sys.executable, str(SCRIPT), *map(str, args)]


def environment(**more: str) -> dict[str, str]:
    """With steps that compile fast and run slowly."""
    fast = {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return os.environ | fast | more


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled steps, shared by all runs of a session."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"


Infer = Callable[..., Ran]


@pytest.fixture
def infer(tmp_path: Path, tiny_model: Path, cache: Path) -> Infer:
    """Runs rows, or a file's bytes, on the tiny model in `tmp_path`; stderr stays short and free
    of tracebacks."""

    def run(rows: Sequence[object] | bytes | None, *args: object, **env: str) -> Ran:
        path = tmp_path / "rows.jsonl"
        if rows is not None:
            lines = rows if isinstance(rows, bytes) else as_lines(rows)
            path.write_bytes(lines)
        given = command("--input", path, "--model", tiny_model, "--compile-cache", cache, *args)
        done = subprocess.run(
            given, cwd=tmp_path, env=environment(**env), capture_output=True, timeout=300
        )
        lines = done.stderr.decode("utf-8").splitlines()
        assert not done.stdout and len(lines) <= 30
        assert not any(line.startswith("Traceback") for line in lines)
        return Ran(done.returncode, lines, path.with_suffix(".outputs.jsonl"))

    return run


def as_lines(rows: Sequence[object]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)
