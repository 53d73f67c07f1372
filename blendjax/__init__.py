"""blendjax: offline LLM inference on JAX, scheduled by resource demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blendjax.config import EngineConfig, MeshSpec
from blendjax.core import Completion, PromptRow, Request, RowError, Sampling

if TYPE_CHECKING:
    from blendjax.engine.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Completion",
    "EngineConfig",
    "MeshSpec",
    "PromptRow",
    "Request",
    "RowError",
    "Sampling",
]


def __getattr__(name: str) -> Any:
    """`LLM` brings jax with it: import it only when it is asked for."""
    if name != "LLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from blendjax.engine.llm import LLM

    return LLM
