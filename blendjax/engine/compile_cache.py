"""Compiled steps kept on disk, and the count that shows that a warm run compiles nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax


class CompileCounter:
    """Counts XLA compiles of this process: after warm-up there must be none."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._seen)

    def _seen(self, event: str, duration_secs: float, **_: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"

    def reset(self) -> None:
        self.count = 0


def use_compile_cache(directory: str | None) -> str | None:
    """Keep compiled steps on disk; an unusable directory costs a note, not the run."""
    if directory == "":
        return None
    path = Path(directory or "~/.cache/blendjax/xla")
    try:
        if not directory:
            base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            path = Path(base) / "blendjax" / "xla"
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".write-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        reason = error.strerror if isinstance(error, OSError) else error
        return f"compile cache {path} is unusable ({reason}): steps compile anew"
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return None
