"""Eight virtual CPU devices for the whole suite, asked for before anything starts JAX."""

import os
from pathlib import Path

import jax
import pytest

from tests.tiny import TinyModel, write_tiny

# Compiling is most of the suite's time, and these make it half. Slower code, same sums.
_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The tiny model with its true weights."""
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_model(tiny: TinyModel) -> Path:
    """Only its file."""
    return tiny.path
