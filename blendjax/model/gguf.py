"""A GGUF file as a `Checkpoint`: its config, its metadata, its tensors dequantised one by one.

Refuses by name, before any allocation, whatever is not a plain Llama decoder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from blendjax.config import ModelConfig
from blendjax.model.loader import CheckpointError

_LAYER_TENSORS = {
    "attn_norm": "attn_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "out",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
_TENSORS = {"token_embd": "embed", "output_norm": "norm", "output": "head"}
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFCheckpoint:
    """An open GGUF file (memory-mapped: opening reads only its header)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, OSError, IndexError) as error:
            what = f"{path}: not a readable GGUF file ({error})"
            raise CheckpointError(f"{what}: cut off, or of another kind?") from error
        self._tensors = {_our_name(t.name): t for t in self._reader.tensors}
        for tensor in {t.tensor_type: t for t in self._reader.tensors}.values():
            self._dequantize(tensor, tensor.data[:1])

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        return {key: field.contents() for key, field in self._reader.fields.items()}

    @cached_property
    def config(self) -> ModelConfig:
        try:
            return read_config(self.metadata, self._rope_factors(), "head" not in self._tensors)
        except CheckpointError:
            raise
        except ValueError as error:  # a ModelConfig that can't be
            raise CheckpointError(f"{self.path}: {error}") from error

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling defaults that the file recommends (`general.sampling.*`)."""
        known = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
        have = {ours: self.metadata.get(f"general.sampling.{key}") for key, ours in known.items()}
        found = {ours: value for ours, value in have.items() if value is not None}
        if found.get("top_k", 0) < 0:  # off
            del found["top_k"]
        return found

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """GGUF lists dimensions fastest first: [in, out] for a matrix; embeddings stay [V, D]."""
        return {
            name: tuple(int(n) for n in (t.shape[::-1] if name in ("embed", "head") else t.shape))
            for name, t in self._tensors.items()
            if name != _ROPE_FACTORS
        }

    def read(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        full = self._dequantize(tensor, tensor.data)
        if name.endswith((".q", ".k")):
            full = _unpermute(full, self.config.head_dim)
        return full if full.ndim == 1 or name in ("embed", "head") else full.T

    def _dequantize(self, tensor: gguf.ReaderTensor, rows: np.ndarray) -> np.ndarray:
        """float32; `rows` are some of the tensor's."""
        try:
            return np.asarray(gguf.dequantize(rows, tensor.tensor_type), np.float32)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name!r} has type {kind}, which can't be dequantised"
            ) from error

    def _rope_factors(self) -> tuple[float, ...] | None:
        tensor = self._tensors.get(_ROPE_FACTORS)
        return None if tensor is None else tuple(float(x) for x in tensor.data)


def _our_name(name: str) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if layer and layer[2] in _LAYER_TENSORS:
        return f"layers.{layer[1]}.{_LAYER_TENSORS[layer[2]]}"
    return _TENSORS.get(name.removesuffix(".weight"), name)


def _unpermute(full: np.ndarray, head_dim: int) -> np.ndarray:
    """GGUF interleaves the two rotated halves of each head; give them back as halves."""
    pairs = full.reshape(-1, head_dim // 2, 2, full.shape[-1])
    return pairs.swapaxes(1, 2).reshape(full.shape)


def read_config(
    metadata: Mapping[str, Any], rope_factors: tuple[float, ...] | None, tied: bool
) -> ModelConfig:
    """ModelConfig from GGUF metadata: the only place that knows GGUF's keys."""
    arch = metadata.get("general.architecture")
    if arch != "llama":
        raise CheckpointError(f"architecture {arch!r} is not supported; supported: llama")
    for key, why in (
        ("expert_count", "mixture of experts"),
        ("attention.sliding_window", "sliding-window attention"),
        ("attention.layer_norm_epsilon", "LayerNorm"),
        ("logit_scale", "logit scaling"),
        ("embedding_scale", "embedding scaling"),
        ("residual_scale", "residual scaling"),
    ):
        if metadata.get(f"llama.{key}"):
            raise CheckpointError(f"llama.{key} is set: {why} is not supported yet")

    def need(key: str) -> Any:
        key = key if key.startswith("tokenizer.") else f"llama.{key}"
        if key not in metadata:
            raise CheckpointError(f"metadata key {key} is missing")
        return metadata[key]

    heads, hidden = int(need("attention.head_count")), int(need("embedding_length"))
    head_dim = int(metadata.get("llama.attention.key_length", hidden // heads))
    _check_rope(metadata, head_dim)
    return ModelConfig(
        name=str(metadata.get("general.name", "llama")),
        num_layers=int(need("block_count")),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=int(metadata.get("llama.attention.head_count_kv", heads)),
        head_dim=head_dim,
        ffn=int(need("feed_forward_length")),
        vocab=len(need("tokenizer.ggml.tokens")),
        max_len=int(need("context_length")),
        rope_theta=float(metadata.get("llama.rope.freq_base", 10000.0)),
        rms_eps=float(need("attention.layer_norm_rms_epsilon")),
        tied=tied,
        rope_factors=rope_factors,
    )


def _check_rope(metadata: Mapping[str, Any], head_dim: int) -> None:
    rotated = int(metadata.get("llama.rope.dimension_count", head_dim))
    values = int(metadata.get("llama.attention.value_length", head_dim))
    if rotated != head_dim or values != head_dim:
        raise CheckpointError(
            f"head_dim={head_dim} with {rotated} rotated and {values} value dimensions: "
            "partial rotation and unequal heads are not supported"
        )
    for key in ("llama.rope.scaling.factor", "llama.rope.scale_linear"):
        if float(metadata.get(key) or 1.0) != 1.0:
            raise CheckpointError(f"{key} is {metadata[key]}: linear RoPE scaling is not supported")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise CheckpointError(
            f"RoPE scaling {scaling!r} is not supported; supported: none and llama3"
        )
