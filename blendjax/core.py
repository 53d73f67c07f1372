"""Host records that pass between the stages of a run: numpy only, each complete when made.

PromptRow -> Request -> (plan, step) -> Completion          a row that can't run: RowError
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length"]
RowKind = Literal["chat", "completion"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of one row are drawn; ranges are checked here, once.

    `max_tokens=None` means: what the context leaves. `seed=None` means: derived from the run's
    seed and the row's `custom_id` (design section 6). `temperature=0` is greedy.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature must be in [0, 100], got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 1, or 0 or -1 for off, got {self.top_k}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be in [0, 2**64), got {self.seed}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be at least 0, got {self.min_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is over max_tokens={self.max_tokens}")
        if any(not text for text in self.stop):
            raise ValueError("stop must not hold an empty string")

    @property
    def greedy(self) -> bool:
        """Below 1e-5 a division by the temperature would leave float32; the argmax is drawn."""
        return self.temperature < 1e-5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One well-formed input line. Exactly one of `prompt`, `messages`, `token_ids` is given."""

    index: int  # 0-based among the non-blank lines: `row` of the plan log
    line: int  # 1-based line of the file, as an editor counts
    custom_id: str
    kind: RowKind  # decides the shape of the answer: message or text
    sampling: Sampling
    prompt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    token_ids: tuple[int, ...] | None = None
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowError:
    """A row that has no answer, and why. It still becomes exactly one output line."""

    index: int
    line: int
    custom_id: str
    message: str
    code: str = "invalid_request"  # machine-readable: invalid_json, invalid_value, not_supported...
    param: str | None = None  # the field at fault, where one is


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A row ready to run: `prompt_T` is int32, non-empty and read-only."""

    index: int
    line: int
    custom_id: str
    kind: RowKind
    prompt_T: np.ndarray
    sampling: Sampling
    seed: int  # 64 bits: the row's own, or derived from (run seed, custom_id)
    max_new: int  # tokens it may generate at most: max_tokens cut to what the context leaves
    stop_ids: frozenset[int]  # the model's EOS ids (unless ignored) and the row's stop_token_ids

    def __post_init__(self) -> None:
        if self.prompt_T.dtype != np.int32 or not len(self.prompt_T):
            raise ValueError(f"row {self.index}: prompt must be non-empty int32")
        if self.max_new < 1:
            raise ValueError(f"row {self.index}: max_new must be at least 1")
        self.prompt_T.setflags(write=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished row. `text` holds no stop string; `token_ids` are all that were generated, the
    EOS or stop token that ended the row included, so `usage` counts what was really computed."""

    request: Request
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    cached_tokens: int  # prompt tokens whose KV came from a shared prefix
    margins: tuple[float, ...] = ()  # top-2 gap of each token's scores, where the run asked for it
