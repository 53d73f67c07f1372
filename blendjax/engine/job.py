"""From input rows to requests: prompts encoded, lengths bounded, seeds derived, misfits refused."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from blendjax.config import EngineConfig
from blendjax.core import PromptRow, Request, RowError
from blendjax.io.tokenizer import TextCodec


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What a file comes to: rows that run, rows that don't, and rows whose length was cut."""

    requests: list[Request]
    errors: list[RowError]
    shortened: int  # rows that asked for more tokens than the context leaves


def make_job(
    rows: Sequence[PromptRow | RowError],
    codec: TextCodec,
    config: EngineConfig,
    *,
    max_model_len: int,
) -> Job:
    """Rule: prompt + new tokens <= max_model_len; at least one new token must fit."""
    errors = [row for row in rows if isinstance(row, RowError)]
    good = [row for row in rows if isinstance(row, PromptRow)]
    requests, shortened = [], 0
    for row, prompt in zip(good, codec.encode_rows(good, max_model_len=max_model_len), strict=True):
        if not isinstance(prompt, RowError):
            prompt = _unknown_stop(row, codec.vocab_size) or prompt
        if isinstance(prompt, RowError):
            errors.append(prompt)
            continue
        asked = row.sampling.max_tokens
        room = max_model_len - len(prompt)
        shortened += asked is not None and asked > room
        requests.append(_request(row, prompt, codec, config, min(asked or room, room)))
    return Job(requests, sorted(errors, key=lambda e: e.index), shortened)


def _unknown_stop(row: PromptRow, vocab_size: int) -> RowError | None:
    for token in row.sampling.stop_token_ids:
        if token >= vocab_size:
            return RowError(
                index=row.index,
                line=row.line,
                custom_id=row.custom_id,
                code="invalid_value",
                message=f"line {row.line}: stop_token_ids holds {token}, which is not in the "
                f"vocabulary [0, {vocab_size})",
                param="stop_token_ids",
            )
    return None


def _request(
    row: PromptRow, prompt: np.ndarray, codec: TextCodec, config: EngineConfig, max_new: int
) -> Request:
    sampling = row.sampling
    stop_ids = frozenset(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stop_ids |= codec.eos_ids
    seed = sampling.seed
    return Request(
        index=row.index,
        line=row.line,
        custom_id=row.custom_id,
        kind=row.kind,
        prompt_T=prompt,
        sampling=sampling,
        seed=derive_seed(config.seed, row.custom_id) if seed is None else seed,
        max_new=max_new,
        stop_ids=stop_ids,
    )


def derive_seed(run_seed: int, custom_id: str) -> int:
    """64 bits for a row that names no seed: the same in every order, mesh and resume."""
    text = f"{run_seed}:{custom_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def fit_to_pool(job: Job, *, capacity_tokens: int) -> Job:
    """Bound rows by what one rank's KV pool can hold: the last token needs no room in it.

    A prompt that can never fit is an error row; an answer that would outgrow the pool alone is cut.
    """
    requests, errors, shortened = [], list(job.errors), job.shortened
    for request in job.requests:
        room = capacity_tokens - len(request.prompt_T) + 1
        if room < 1:
            errors.append(_too_large(request, capacity_tokens))
            continue
        shortened += request.max_new > room
        requests.append(dataclasses.replace(request, max_new=min(request.max_new, room)))
    return Job(requests, sorted(errors, key=lambda e: e.index), shortened)


def _too_large(request: Request, capacity_tokens: int) -> RowError:
    return RowError(
        index=request.index,
        line=request.line,
        custom_id=request.custom_id,
        code="kv_cache_exceeded",
        message=f"line {request.line}: the prompt has {len(request.prompt_T)} tokens, the whole KV "
        f"cache of a data rank holds {capacity_tokens}; raise --num-pages or use a larger mesh",
    )
