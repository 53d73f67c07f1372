"""Frozen settings, validated once: model shape, mesh, heads on the mesh, engine."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

Dtype = Literal["float32", "bfloat16"]
KernelImpl = Literal["reference"]


class SettingError(ValueError):
    """A setting that the model or the machine can't have."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a Llama decoder. `rope_factors` divide the inverse frequencies (llama3)."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_len: int
    rope_theta: float
    rms_eps: float
    tied: bool
    rope_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for RoPE")
        if self.rope_factors is not None and len(self.rope_factors) != self.head_dim // 2:
            raise ValueError(
                f"{len(self.rope_factors)} rope factors for head_dim={self.head_dim}: "
                f"expected {self.head_dim // 2}"
            )

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def layer_params(self) -> int:
        """Parameters of all layers, without embedding and head."""
        attention = self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden * self.ffn + 2 * self.hidden)

    @property
    def params(self) -> int:
        embedding = self.vocab * self.hidden
        return self.layer_params + embedding * (1 if self.tied else 2) + self.hidden


@dataclasses.dataclass(frozen=True, slots=True)
class MeshSpec:
    """`data x model` = DP ranks x TP shards."""

    data: int
    model: int

    def __post_init__(self) -> None:
        if self.data < 1 or self.model < 1:
            raise ValueError(f"mesh {self} must be at least 1x1")

    @classmethod
    def parse(cls, text: str) -> MeshSpec:
        match = re.fullmatch(r"\s*(\d+)[xX*](\d+)\s*", text)
        if match is None:
            raise ValueError(f"mesh must look like 2x4 (data x model), got {text!r}")
        return cls(int(match[1]), int(match[2]))

    @property
    def size(self) -> int:
        return self.data * self.model

    def __str__(self) -> str:
        return f"{self.data}x{self.model}"


@dataclasses.dataclass(frozen=True, slots=True)
class HeadLayout:
    """How heads, FFN columns and vocabulary lie on `shards` TP shards, whatever they divide by.

    With K KV heads and T shards each KV head is replicated `replicas = max(1, T // K)` times, the
    copies are padded with zero heads up to a multiple of T, and the query group G is padded up to
    a multiple of `replicas`; each copy serves `group / replicas` query heads. 9 heads over 3 KV
    heads on 8 shards: 2 copies of each, 6 -> 8 KV heads, G 3 -> 4, so 1 KV and 2 query heads each.
    """

    shards: int
    kv_heads: int  # local to a shard, copies and zero heads included
    group: int  # query heads a local KV head serves
    replicas: int
    ffn: int  # local columns, zero-padded
    vocab: int  # local rows; rows past the vocabulary are masked

    @classmethod
    def of(cls, model: ModelConfig, shards: int) -> HeadLayout:
        replicas = max(1, shards // model.num_kv_heads)
        return cls(
            shards=shards,
            kv_heads=-(-model.num_kv_heads * replicas // shards),
            group=-(-model.group // replicas),
            replicas=replicas,
            ffn=-(-model.ffn // shards),
            vocab=-(-model.vocab // shards),
        )

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What a run is made of, apart from the model and the file. `num_pages` counts per data rank
    and includes the scratch page 0. None leaves the choice to the platform: all accelerators or
    mesh 1x1; bfloat16, or float32 on a CPU; as many pages as memory holds."""

    mesh: MeshSpec | None = None
    policy: str = "dfs"
    dtype: Dtype | None = None
    page_size: int = 16
    num_pages: int | None = None
    max_seqs: int = 128
    step_tokens: int = 512
    max_model_len: int | None = None
    seed: int = 0
    prefix_sharing: bool = True
    record_margins: bool = False
    kernels: KernelImpl = "reference"

    def __post_init__(self) -> None:
        for field in ("page_size", "max_seqs", "step_tokens"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.num_pages is not None and self.num_pages < 2:
            raise ValueError(
                f"num_pages must be at least 2 (page 0 is the scratch page), got {self.num_pages}"
            )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, got {self.max_model_len}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be in [0, 2**64), got {self.seed}")
