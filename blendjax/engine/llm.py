"""The engine as one object: open a model on a mesh, give it rows, iterate over finished ones."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from blendjax.config import EngineConfig, HeadLayout, ModelConfig, SettingError
from blendjax.core import Completion, PromptRow, RowError, Sampling
from blendjax.engine.mesh import default_mesh, make_mesh, reserve_cpu_devices
from blendjax.engine.run import Run, Say
from blendjax.engine.runner import CompiledSteps
from blendjax.io.tokenizer import TextCodec
from blendjax.model.find import find_model
from blendjax.model.gguf import GGUFCheckpoint
from blendjax.model.loader import CheckpointError, check
from blendjax.model.placement import place
from blendjax.model.step import PoolSizes
from blendjax.sched.scan import POLICIES


class LLM:
    """A model on a mesh. Its weights load in the background until the first run needs them."""

    def __init__(
        self,
        model: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        say: Say = lambda text: None,
    ) -> None:
        """`model`: a .gguf file, or None for the demo. Raises `CheckpointError`, `MeshError`."""
        config = config or EngineConfig()
        if config.policy not in POLICIES:
            raise SettingError(f"policy {config.policy!r} is unknown; known: {', '.join(POLICIES)}")
        self._say = say
        reserve_cpu_devices(config.mesh)
        began = time.perf_counter()
        self._checkpoint = GGUFCheckpoint(find_model(model))
        self.model: ModelConfig = self._checkpoint.config
        if (config.max_model_len or 0) > self.model.max_len:
            raise SettingError(
                f"max_model_len={config.max_model_len} is over the model's own {self.model.max_len}"
            )
        check(self._checkpoint, self.model)
        self.codec = TextCodec.from_gguf(self._checkpoint.metadata)
        if self.codec.vocab_size != self.model.vocab:
            raise CheckpointError(
                f"{self.model.vocab} rows of embeddings for {self.codec.vocab_size} tokens"
            )
        number_bytes = 4 if config.dtype == "float32" else 2
        self.mesh_spec = config.mesh or default_mesh(number_bytes * self.model.params)
        self.devices = make_mesh(self.mesh_spec)
        platform = self.devices.mesh.devices.flat[0].platform
        self.dtype: Any = jnp.dtype(
            config.dtype or ("float32" if platform == "cpu" else "bfloat16")
        )
        self.config = dataclasses.replace(config, mesh=self.mesh_spec)
        self.layout = HeadLayout.of(self.model, self.mesh_spec.model)
        self.load_s = time.perf_counter() - began
        self._loading: Future[Any] = ThreadPoolExecutor(1).submit(self._load)
        self._steps: dict[Any, CompiledSteps] = {}

    @property
    def sampling_defaults(self) -> Sampling:
        """What the model's files say for rows that name nothing."""
        try:
            return Sampling(**self._checkpoint.sampling)
        except ValueError as error:
            raise CheckpointError(f"general.sampling.* of the model file: {error}") from error

    @property
    def source(self) -> str:
        """Which weights these are: size and first megabyte of the file, hashed."""
        with self._checkpoint.path.open("rb") as file:
            head = hashlib.sha256(file.read(1 << 20)).hexdigest()
        return f"{self._checkpoint.path.stat().st_size}-{head[:16]}"

    @property
    def max_model_len(self) -> int:
        return self.config.max_model_len or self.model.max_len

    def _load(self) -> Any:
        began = time.perf_counter()
        mesh = self.devices.mesh
        params = place(self._checkpoint, self.model, self.layout, mesh, dtype=self.dtype)
        self.load_s += time.perf_counter() - began
        return params

    def params(self) -> Any:
        """The weights on the mesh; waits for them."""
        return self._loading.result()

    def steps(self, sizes: PoolSizes) -> CompiledSteps:
        """Compiled steps for a pool of these sizes, kept for later runs."""
        if sizes not in self._steps:
            self._steps[sizes] = CompiledSteps(
                self.model,
                self.layout,
                self.devices.mesh,
                sizes=sizes,
                dtype=self.dtype,
                margins=self.config.record_margins,
            )
        return self._steps[sizes]

    def start(self, rows: Sequence[PromptRow | RowError]) -> Run:
        """Encode, plan and compile what `rows` need; the returned run yields their answers."""
        return Run(self, rows, self._say)

    def generate(
        self, prompts: Sequence[str | PromptRow], sampling: Sampling | None = None
    ) -> list[Completion | RowError]:
        """Answers in the order of `prompts`; a row that can't run is a `RowError` in its place."""
        run = self.start([_row(i, p, sampling or Sampling()) for i, p in enumerate(prompts)])
        answers = {answer_index(answer): answer for answer in run}
        return [answers[i] for i in range(len(prompts))]


def answer_index(answer: Completion | RowError) -> int:
    """The input row of an answer."""
    return answer.index if isinstance(answer, RowError) else answer.request.index


def _row(index: int, prompt: str | PromptRow, sampling: Sampling) -> PromptRow:
    if isinstance(prompt, PromptRow):
        return dataclasses.replace(prompt, index=index)
    return PromptRow(
        index=index,
        line=index + 1,
        custom_id=f"row-{index + 1}",
        kind="completion",
        sampling=sampling,
        prompt=prompt,
    )
